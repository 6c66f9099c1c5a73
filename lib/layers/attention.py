"""Core attention: softmax(Q K^T / sqrt(D)) V, causal, by one of several backends.

Shape legend: S sequence, B batch, N query heads, G key/value heads (N is a multiple of G),
D head dimension. Inputs are [S, B, N, D] and [S, B, G, D]; the output is [S, B, N * D].
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

CoreAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _heads_second(x_SBND: Tensor) -> Tensor:
    return x_SBND.permute(1, 2, 0, 3)


def _merge_heads(x_BNSD: Tensor) -> Tensor:
    return x_BNSD.permute(2, 0, 1, 3).flatten(2)


def sdpa_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, dropout: float) -> Tensor:
    """Torch's scaled_dot_product_attention; never forms the S x S matrix."""
    context = F.scaled_dot_product_attention(
        _heads_second(q_SBND),
        _heads_second(k_SBGD),
        _heads_second(v_SBGD),
        dropout_p=dropout,
        is_causal=True,
        enable_gqa=q_SBND.shape[2] != k_SBGD.shape[2],
    )
    return _merge_heads(context)


def reference_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, dropout: float) -> Tensor:
    """The formula spelt out; softmax in fp32. Slow: what the others are checked against."""
    group_size = q_SBND.shape[2] // k_SBGD.shape[2]
    q_BNSD = _heads_second(q_SBND)
    k_BNSD = _heads_second(k_SBGD).repeat_interleave(group_size, dim=1)
    v_BNSD = _heads_second(v_SBGD).repeat_interleave(group_size, dim=1)
    scores = q_BNSD @ k_BNSD.transpose(-1, -2) / math.sqrt(q_SBND.shape[-1])
    length = scores.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    return _merge_heads(F.dropout(weights.to(v_BNSD.dtype), dropout) @ v_BNSD)


BACKENDS: dict[str, CoreAttention] = {"sdpa": sdpa_attention, "reference": reference_attention}


def attention_backend(name: str) -> CoreAttention:
    """The backend of that name; ``auto`` takes torch's own choice, ``sdpa``."""
    return BACKENDS["sdpa" if name == "auto" else name]
