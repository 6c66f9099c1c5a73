"""What each attention backend can serve: a reason where it cannot, from facts known beforehand.

The limits are those of the kernels: torch's (``sdp_utils.cpp``) for NVIDIA GPUs of compute
capability 8.0 (A100) and later, the packages' own for theirs. Limits that depend on a library's
release, such as heads of 256, are left to a trial on the device (``lib.layers.attention_choice``).
"""

from dataclasses import dataclass

import torch
from torch.backends import cudnn

from lib.layers.flash_packages import FLASH_ATTN_4, why_no_flash_attn, why_no_module

# Of a GPU: major and minor number. None is a CPU.
Capability = tuple[int, int] | None

_HALF = (torch.bfloat16, torch.float16)
_CUDNN_DROPOUTS = 16  # cuDNN draws from so many steps of probability
# Earlier releases read beyond the end of other lengths (github.com/pytorch/pytorch/issues/169849).
_CUDNN_FOR_ANY_LENGTH = 91501
_CUDNN_BLOCK = 128


@dataclass(frozen=True)
class AttentionCase:
    """What the attention of a run has to serve.

    Attributes:
        seq_length: S, whole sequences also where activations are cut along them.
        micro_batch_size: B.
        heads: N, query heads of one rank.
        kv_heads: G, key and value heads of one rank.
        head_dim: D.
        dtype: of queries, keys and values.
        dropout: share of the weights that is dropped.
        documents: whether tokens see their own document only.
        deterministic: whether the same input has to give the same bits.
    """

    seq_length: int
    micro_batch_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    dropout: float
    documents: bool
    deterministic: bool


def serves_all(case: AttentionCase, capability: Capability) -> str | None:
    """Of a backend made of torch's operations, which run everywhere."""
    del case, capability
    return None


def why_not_cudnn(case: AttentionCase, capability: Capability) -> str | None:
    """Of cuDNN's attention, by way of torch's scaled_dot_product_attention.

    Torch gives it documents of different lengths only through nested tensors, experimentally.
    """
    if case.documents:
        return "does not attend within documents"
    if case.deterministic:
        return "is not deterministic"
    if case.dropout * _CUDNN_DROPOUTS % 1:
        return f"takes dropout in multiples of 1/{_CUDNN_DROPOUTS}, not {case.dropout}"
    device = _no_gpu(capability, (8, 0))
    return device or _no_half(case) or _no_heads(case, 256) or _no_cudnn_length(case)


def why_not_flash(case: AttentionCase, capability: Capability) -> str | None:
    """Of torch's own copy of flash attention 2."""
    if case.documents and case.dropout:
        return "has no dropout within documents"
    return _no_gpu(capability, (8, 0)) or _no_half(case) or _no_heads(case, 256)


def why_not_efficient(case: AttentionCase, capability: Capability) -> str | None:
    """Of torch's memory-efficient attention, the fused one for GPUs before 8.0 and for fp32."""
    if case.dtype not in (*_HALF, torch.float32):
        return f"does not compute in {_name(case.dtype)}"
    needed = (8, 0) if case.dtype == torch.bfloat16 else (5, 0)
    multiple = 4 if case.dtype == torch.float32 else 8  # 16 bytes
    return _no_gpu(capability, needed) or _no_heads(case, None, multiple)


def why_not_flash_attn(case: AttentionCase, capability: Capability) -> str | None:
    """Of the package flash-attn, 2 or 3."""
    return (
        _no_gpu(capability, (8, 0))
        or _no_half(case)
        or _no_heads(case, 256)
        or why_no_flash_attn(capability, case.dropout)
    )


def why_not_flash_attn_4(case: AttentionCase, capability: Capability) -> str | None:
    """Of the package flash-attn-4, whose backward pass needs Hopper or Blackwell."""
    if case.dropout:
        return "has no dropout"
    major = 0 if capability is None else capability[0]
    if case.deterministic and major == 12:
        return "is not deterministic on this GPU"
    most = 128 if major in (10, 11) and case.head_dim != 256 else 256
    return (
        _no_gpu(capability, (9, 0))
        or _no_half(case)
        or _no_heads(case, most)
        or why_no_module(FLASH_ATTN_4)
    )


def _no_gpu(capability: Capability, needed: tuple[int, int]) -> str | None:
    if capability is None:
        return "needs a GPU"
    if capability < needed:
        major, minor = capability
        wanted = f"{needed[0]}.{needed[1]}"
        return f"needs a GPU of compute capability {wanted} or later, this one has {major}.{minor}"
    return None


def _no_half(case: AttentionCase) -> str | None:
    if case.dtype in _HALF:
        return None
    return f"computes in bf16 and fp16 only, not in {_name(case.dtype)}"


def _no_cudnn_length(case: AttentionCase) -> str | None:
    if case.seq_length == 1:
        return "takes no sequences of one token"
    if case.seq_length % _CUDNN_BLOCK and (cudnn.version() or 0) < _CUDNN_FOR_ANY_LENGTH:
        return f"needs cuDNN 9.15.1 for lengths that are no multiple of {_CUDNN_BLOCK}"
    return None


def _no_heads(case: AttentionCase, most: int | None, multiple: int = 8) -> str | None:
    if case.head_dim % multiple:
        return f"wants a head dimension that is a multiple of {multiple}, not {case.head_dim}"
    if most is not None and case.head_dim > most:
        return f"wants a head dimension of {most} or less, not {case.head_dim}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
