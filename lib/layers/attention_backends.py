"""The attention backends: softmax(Q K^T / sqrt(D)) V, causal, each in its own way.

Queries, keys and values may be strided views, such as parts of one fused tensor: they are passed on
as views, and the output of torch's fused kernels has their order of dimensions, so that joining
its heads copies nothing.

Shape legend: S sequence, B batch, N query heads, G key/value heads (N = G * R), D head dimension.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.layers import flash_packages
from lib.layers.documents import Documents
from lib.layers.flash_packages import FlashFunctions
from lib.layers.softmax import scaled_masked_softmax


def _heads_second(x_SBND: Tensor) -> Tensor:
    return x_SBND.permute(1, 2, 0, 3)


def _merge_heads(x_BNSD: Tensor) -> Tensor:
    return x_BNSD.permute(2, 0, 1, 3).flatten(2)


def sdpa_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """Torch's scaled_dot_product_attention, by the kernel that torch picks.

    Documents go through flash attention where it can serve, else by a mask.
    """
    if documents is not None and _has_flash_kernel(q_SBND, dropout):
        return _document_by_document(q_SBND, k_SBGD, v_SBGD, documents, _torch_flash())
    return _sdpa(q_SBND, k_SBGD, v_SBGD, dropout, documents)


def cudnn_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """CuDNN's kernel and no other; without documents."""
    assert documents is None, "cudnn serves no documents"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q_SBND, k_SBGD, v_SBGD, dropout, None)


def flash_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """Torch's flash attention and no other; with documents, without dropout."""
    if documents is not None:
        assert dropout == 0.0, "flash has no dropout within documents"
        return _document_by_document(q_SBND, k_SBGD, v_SBGD, documents, _torch_flash())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(q_SBND, k_SBGD, v_SBGD, dropout, None)


def efficient_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """Torch's memory-efficient attention and no other; documents by a mask.

    It knows no shared key/value heads, so these are repeated.
    """
    shared = q_SBND.shape[2] // k_SBGD.shape[2]
    if shared > 1:
        k_SBGD, v_SBGD = (x.repeat_interleave(shared, dim=2) for x in (k_SBGD, v_SBGD))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return _sdpa(q_SBND, k_SBGD, v_SBGD, dropout, documents)


def flash_attn_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """The package flash-attn, 3 where it can serve, else 2."""
    functions = flash_packages.flash_attn(q_SBND.device, dropout)
    return _by_package(functions, q_SBND, k_SBGD, v_SBGD, documents)


def flash_attn_4_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """The package flash-attn-4; without dropout."""
    assert dropout == 0.0, "flash_attn_4 has no dropout"
    return _by_package(flash_packages.flash_attn_4(), q_SBND, k_SBGD, v_SBGD, documents)


def fused_softmax_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """Two batched products and between them one kernel: scale, mask and softmax in place.

    The S x S weights are formed and kept for backward. Query heads that share a key/value head are
    rows of one product, so keys and values are never repeated.
    """
    length, rows, heads, size = q_SBND.shape
    pairs = rows * k_SBGD.shape[2]
    q = _heads_second(q_SBND).reshape(pairs, -1, size)  # [B * G, R * S, D]
    k = _heads_second(k_SBGD).reshape(pairs, length, size)
    v = _heads_second(v_SBGD).reshape(pairs, length, size)
    # Scaled before they are rounded: fp16 ends at 65504.
    nothing, scale = q.new_empty(1), 1.0 / math.sqrt(size)
    scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0.0, alpha=scale)
    # No view for autograd, which would copy what the kernel overwrites; nobody reads scores again.
    scores_BNSS = torch.ops.aten._unsafe_view(scores, [rows, heads, length, length])
    hidden = None if documents is None else ~documents.allowed()
    weights_BNSS = scaled_masked_softmax(scores_BNSS, 1.0, hidden, fused=True)
    if dropout > 0.0:
        weights_BNSS = F.dropout(weights_BNSS, dropout)
    context = weights_BNSS.view(pairs, -1, length) @ v
    return _merge_heads(context.view(rows, heads, length, size))


def reference_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """The formula spelt out; softmax in fp32. Slow: what the others are checked against."""
    group_size = q_SBND.shape[2] // k_SBGD.shape[2]
    q_BNSD = _heads_second(q_SBND)
    k_BNSD = _heads_second(k_SBGD).repeat_interleave(group_size, dim=1)
    v_BNSD = _heads_second(v_SBGD).repeat_interleave(group_size, dim=1)
    scores = q_BNSD @ k_BNSD.transpose(-1, -2) / math.sqrt(q_SBND.shape[-1])
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    if documents is not None:
        hidden = ~documents.allowed()
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    return _merge_heads(F.dropout(weights.to(v_BNSD.dtype), dropout) @ v_BNSD)


def _sdpa(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    dropout: float,
    documents: Documents | None,
) -> Tensor:
    context = F.scaled_dot_product_attention(
        _heads_second(q_SBND),
        _heads_second(k_SBGD),
        _heads_second(v_SBGD),
        attn_mask=None if documents is None else documents.allowed(),
        dropout_p=dropout,
        is_causal=documents is None,
        enable_gqa=q_SBND.shape[2] != k_SBGD.shape[2],
    )
    return _merge_heads(context)


def _has_flash_kernel(q_SBND: Tensor, dropout: float) -> bool:
    """Whether torch's flash attention can take documents of different lengths."""
    return (
        q_SBND.is_cuda
        and q_SBND.dtype in (torch.bfloat16, torch.float16)
        and dropout == 0.0  # its Python interface has none
        and q_SBND.shape[-1] % 8 == 0
        and q_SBND.shape[-1] <= 256
        and torch.cuda.get_device_capability(q_SBND.device) >= (8, 0)
    )


def _document_by_document(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    documents: Documents,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Flash attention over the tokens of all sequences one after another, cut into documents.

    Args:
        q_SBND: queries.
        k_SBGD: keys.
        v_SBGD: values.
        documents: of all sequences.
        attend: takes queries, keys and values, [S * B, heads, D], and where documents begin and
            how long they are at most, by the names of the flash-attn package.
    """
    length, rows = q_SBND.shape[:2]
    context = attend(
        *(x.transpose(0, 1).flatten(0, 1) for x in (q_SBND, k_SBGD, v_SBGD)),
        cu_seqlens_q=documents.offsets,
        cu_seqlens_k=documents.offsets,
        max_seqlen_q=documents.longest,
        max_seqlen_k=documents.longest,
    )
    return context.unflatten(0, (rows, length)).transpose(0, 1).flatten(2)


@cache
def _torch_flash() -> Callable[..., Tensor]:
    """Torch's causal flash attention, for query heads that may share key/value heads.

    Imported at its first use: its module brings in torch's compiler, 4 s that no other user of
    this file should wait for.
    """
    from torch.nn.attention.varlen import varlen_attn

    causal = partial(varlen_attn, window_size=(-1, 0))  # all keys before a query, none after it
    # Torch 2.11 shares heads unasked, later releases want to be asked.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        causal = partial(causal, enable_gqa=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, **cuts: Any) -> Tensor:  # noqa: ANN401
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        found: Any = causal(q, k, v, *(cuts[name] for name in names))
        return found

    return attend


def _by_package(
    functions: FlashFunctions,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    documents: Documents | None,
) -> Tensor:
    if documents is not None:
        return _document_by_document(q_SBND, k_SBGD, v_SBGD, documents, functions.by_document)
    context_BSND = functions.whole(*(x.transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD)))
    return context_BSND.transpose(0, 1).flatten(2)
