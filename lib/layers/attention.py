"""Core attention: softmax(Q K^T / sqrt(D)) V, causal, by one of several backends.

A sequence is one document, or several that do not see each other. For several:

| backend | where | how |
|---|---|---|
| sdpa | GPU, bf16 or fp16, no dropout | flash attention over the documents as so many sequences |
| sdpa | elsewhere | a mask, [B, 1, S, S], whose zeros cost as much as its ones |
| reference | everywhere | the formula spelt out |

Shape legend: S sequence, B batch, N query heads, G key/value heads (N is a multiple of G),
D head dimension. Inputs are [S, B, N, D] and [S, B, G, D], the dropout of the weights and the
documents (None: each sequence is one); the output is [S, B, N * D].
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lib.layers.documents import Documents

CoreAttention = Callable[[Tensor, Tensor, Tensor, float, Documents | None], Tensor]


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
    """Torch's scaled_dot_product_attention; never forms the S x S matrix of one document."""
    if documents is not None and _has_flash_kernel(q_SBND, dropout):
        return _document_by_document(q_SBND, k_SBGD, v_SBGD, documents)
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
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, documents: Documents
) -> Tensor:
    """Flash attention over the tokens of all sequences one after another, cut into documents."""
    length, rows = q_SBND.shape[:2]
    attend = _flash_attention()
    context: Tensor = attend(
        *(x.transpose(0, 1).flatten(0, 1) for x in (q_SBND, k_SBGD, v_SBGD)),
        documents.offsets,
        documents.offsets,
        documents.longest,
        documents.longest,
    )
    return context.unflatten(0, (rows, length)).transpose(0, 1).flatten(2)


@cache
def _flash_attention() -> Callable[..., Any]:
    """Torch's causal flash attention, for query heads that may share key/value heads.

    Imported at its first use: its module brings in torch's compiler, 4 s that no other user of
    this file should wait for.
    """
    from torch.nn.attention.varlen import varlen_attn

    causal = partial(varlen_attn, window_size=(-1, 0))  # all keys before a query, none after it
    # Torch 2.11 shares heads unasked, later releases want to be asked.
    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(causal, enable_gqa=True) if asks else causal


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


BACKENDS: dict[str, CoreAttention] = {"sdpa": sdpa_attention, "reference": reference_attention}


def attention_backend(name: str) -> CoreAttention:
    """The backend of that name; ``auto`` takes torch's own choice, ``sdpa``."""
    return BACKENDS["sdpa" if name == "auto" else name]
