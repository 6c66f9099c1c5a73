"""Core attention: softmax(Q K^T / sqrt(D)) V, causal, by one of several backends.

| backend | what it is | where | dropout | within documents |
|---|---|---|---|---|
| sdpa | torch's scaled_dot_product_attention, its own pick | everywhere | yes | flash, or a mask |
| cudnn | torch's, by cuDNN | GPU, half precision | yes | no |
| flash | torch's, by flash attention 2 | GPU, half precision | yes | yes, without dropout |
| efficient | torch's, by memory-efficient attention | GPU, half precision, fp32 | yes | a mask |
| flash_attn | package flash-attn 2 or 3 | GPU, half precision | with 2 | yes |
| flash_attn_4 | package flash-attn-4 | GPU from Hopper on, half precision | no | yes |
| fused_softmax | two products and one kernel between them | everywhere | yes | a mask |
| reference | the formula spelt out, slow | everywhere | yes | a mask |

``why_not`` of a backend says by name what it cannot serve. A sequence is one document, or several
that do not see each other; a mask, [B, 1, S, S], takes as long for its zeros as for its ones.

Shape legend: S sequence, B batch, N query heads, G key/value heads (N is a multiple of G),
D head dimension. Inputs are [S, B, N, D] and [S, B, G, D], of any strides with a contiguous last
dimension, the dropout of the weights and the documents (None: each sequence is one); the output is
[S, B, N * D].
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.backends import cudnn

from lib.layers import attention_backends as backends
from lib.layers import attention_limits as limits
from lib.layers.attention_limits import FLASH_ATTN_4, AttentionCase
from lib.layers.documents import Documents
from lib.layers.flash_packages import why_no_flash_attn, why_no_module
from lib.layers.gpu_limits import Capability

# Earlier releases read beyond the end of other lengths (github.com/pytorch/pytorch/issues/169849).
_CUDNN_FOR_ANY_LENGTH = 91501
_CUDNN_BLOCK = 128

CoreAttention = Callable[[Tensor, Tensor, Tensor, float, Documents | None], Tensor]


@dataclass(frozen=True)
class Backend:
    """One way to attend.

    Attributes:
        attend: the function.
        why_not: why it cannot serve a case on a device; None if it can.
        is_candidate: whether it may be chosen by its speed.
        keeps_weights: whether it keeps the S x S weights for backward.
    """

    attend: CoreAttention
    why_not: Callable[[AttentionCase, Capability], str | None]
    is_candidate: bool = True
    keeps_weights: bool = False


def _why_not_cudnn(case: AttentionCase, capability: Capability) -> str | None:
    is_old = (cudnn.version() or 0) < _CUDNN_FOR_ANY_LENGTH
    wrong = None
    if case.seq_length % _CUDNN_BLOCK and is_old:
        wrong = f"needs cuDNN 9.15.1 for lengths that are no multiple of {_CUDNN_BLOCK}"
    return limits.why_not_cudnn(case, capability) or wrong


def _why_not_flash_attn(case: AttentionCase, capability: Capability) -> str | None:
    limit = limits.why_not_flash_attn(case, capability)
    return limit or why_no_flash_attn(capability, case.dropout)


def _why_not_flash_attn_4(case: AttentionCase, capability: Capability) -> str | None:
    return limits.why_not_flash_attn_4(case, capability) or why_no_module(FLASH_ATTN_4)


# Of two that are equally fast the first is taken.
BACKENDS: dict[str, Backend] = {
    "cudnn": Backend(backends.cudnn_attention, _why_not_cudnn),
    "flash": Backend(backends.flash_attention, limits.why_not_flash),
    "efficient": Backend(backends.efficient_attention, limits.why_not_efficient),
    "flash_attn": Backend(backends.flash_attn_attention, _why_not_flash_attn),
    "flash_attn_4": Backend(backends.flash_attn_4_attention, _why_not_flash_attn_4),
    "sdpa": Backend(backends.sdpa_attention, limits.serves_all),
    "fused_softmax": Backend(
        backends.fused_softmax_attention, limits.serves_all, keeps_weights=True
    ),
    "reference": Backend(
        backends.reference_attention, limits.serves_all, is_candidate=False, keeps_weights=True
    ),
}


def backend_name(name: str) -> str:
    """The backend that a name stands for: ``auto``, where nothing was measured, for ``sdpa``."""
    return "sdpa" if name == "auto" else name


def attention_backend(name: str) -> CoreAttention:
    """The function of a backend, or of what ``auto`` stands for."""
    return BACKENDS[backend_name(name)].attend
