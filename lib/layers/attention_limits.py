"""What each attention backend can serve: a reason where it cannot, from facts known beforehand.

Without torch, so that a run can be refused before a process is started. Whether the packages and
the libraries of this installation can serve too is asked in ``lib.layers.attention``.

The limits are those of the kernels: torch's (``sdp_utils.cpp``) for NVIDIA GPUs of compute
capability 8.0 (A100) and later, the packages' own for theirs. Limits that depend on a library's
release, such as heads of 256, are left to a trial on the device (``lib.layers.attention_choice``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from lib.layers.gpu_limits import OLDEST_FOR_BF16, Capability, written

FLASH_ATTN_2 = "flash_attn.flash_attn_interface"
FLASH_ATTN_3 = "flash_attn_interface"
FLASH_ATTN_4 = "flash_attn.cute"
PACKAGE_MODULES = (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4)

_HALF = ("bf16", "fp16")
_CUDNN_DROPOUTS = 16  # cuDNN draws from so many steps of probability
_HOPPER = 9


@dataclass(frozen=True)
class AttentionCase:
    """What the attention of a run has to serve.

    Attributes:
        seq_length: S, whole sequences also where activations are cut along them.
        micro_batch_size: B.
        heads: N, query heads of one rank.
        kv_heads: G, key and value heads of one rank.
        head_dim: D.
        dtype: of queries, keys and values: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        dropout: share of the weights that is dropped.
        documents: whether tokens see their own document only.
        deterministic: whether the same input has to give the same bits.
    """

    seq_length: int
    micro_batch_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
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
    if case.seq_length == 1:
        return "takes no sequences of one token"
    return device or _no_half(case) or _no_heads(case, 256)


def why_not_flash(case: AttentionCase, capability: Capability) -> str | None:
    """Of torch's own copy of flash attention 2."""
    if case.documents and case.dropout:
        return "has no dropout within documents"
    return _no_gpu(capability, (8, 0)) or _no_half(case) or _no_heads(case, 256)


def why_not_efficient(case: AttentionCase, capability: Capability) -> str | None:
    """Of torch's memory-efficient attention, the fused one for GPUs before 8.0 and for fp32."""
    if case.dtype not in (*_HALF, "fp32"):
        return f"does not compute in {case.dtype}"
    needed = OLDEST_FOR_BF16 if case.dtype == "bf16" else (5, 0)
    multiple = 4 if case.dtype == "fp32" else 8  # 16 bytes
    return _no_gpu(capability, needed) or _no_heads(case, None, multiple)


def why_not_flash_attn(case: AttentionCase, capability: Capability) -> str | None:
    """Of the package flash-attn, 2 or 3."""
    return _no_gpu(capability, (8, 0)) or _no_half(case) or _no_heads(case, 256)


def why_not_flash_attn_4(case: AttentionCase, capability: Capability) -> str | None:
    """Of the package flash-attn-4, whose backward pass needs Hopper or Blackwell."""
    if case.dropout:
        return "has no dropout"
    major = 0 if capability is None else capability[0]
    if case.deterministic and major == 12:
        return "is not deterministic on this GPU"
    most = 128 if major in (10, 11) and case.head_dim != 256 else 256
    return _no_gpu(capability, (9, 0)) or _no_half(case) or _no_heads(case, most)


LIMITS: dict[str, Callable[[AttentionCase, Capability], str | None]] = {
    "cudnn": why_not_cudnn,
    "flash": why_not_flash,
    "efficient": why_not_efficient,
    "flash_attn": why_not_flash_attn,
    "flash_attn_4": why_not_flash_attn_4,
    "sdpa": serves_all,
    "fused_softmax": serves_all,
    "reference": serves_all,
}


def package_modules(name: str, capability: Capability, dropout: float) -> tuple[str, ...]:
    """Modules of which a backend needs one, the best first; none where torch brings it."""
    if name == "flash_attn_4":
        return (FLASH_ATTN_4,)
    if name != "flash_attn":
        return ()
    is_hopper = capability is not None and capability[0] == _HOPPER
    return (FLASH_ATTN_3, FLASH_ATTN_2) if is_hopper and not dropout else (FLASH_ATTN_2,)


def _no_gpu(capability: Capability, needed: tuple[int, int]) -> str | None:
    if capability is None:
        return "needs a GPU"
    if capability < needed:
        return (
            f"needs a GPU of compute capability {written(needed)} or later, this one has "
            f"{written(capability)}"
        )
    return None


def _no_half(case: AttentionCase) -> str | None:
    if case.dtype in _HALF:
        return None
    return f"computes in bf16 and fp16 only, not in {case.dtype}"


def _no_heads(case: AttentionCase, most: int | None, multiple: int = 8) -> str | None:
    if case.head_dim % multiple:
        return f"wants a head dimension that is a multiple of {multiple}, not {case.head_dim}"
    if most is not None and case.head_dim > most:
        return f"wants a head dimension of {most} or less, not {case.head_dim}"
    return None
