"""Softmax over attention scores, with their scale and masks, in place.

    p_ij = exp(s z_ij - max_k s z_ik) / sum_k exp(s z_ik - max_k s z_ik)     k, j: keys query i sees
    dz_ij = s p_ij (dp_ij - sum_k p_ik dp_ik)

Masked scores and unscaled gradients are never stored: forward overwrites the scores with their
softmax, backward overwrites that with the gradient of the scores. A program does one row in blocks:
once for the maximum and the sum (both kept as blocks go by: Milakov and Gimelshein, online
normalizer calculation for softmax), once more to write, when a row of usual length is still in the
cache. All in fp32.

Causal: the last query sees all keys, and each one before it one key less, so query i sees keys up
to i + Sk - Sq. Those beyond are not read, and backward does not touch their zeros. A row that
sees no key is zero, and so is its gradient.

Shape legend: B batch, N heads, Sq queries, Sk keys.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

# At most 16 elements a thread, see num_warps in ``_blocks``; longer rows are looped over.
_MAX_BLOCK = 4096


@triton.jit
def _visible_keys(query, queries, keys, CAUSAL: tl.constexpr) -> tl.tensor:
    """How many keys a query sees, but for hidden ones; not more than 0 if it sees none."""
    return tl.minimum(keys, query.to(tl.int32) + 1 + keys - queries) if CAUSAL else keys


@triton.jit
def _in_reach(key, visible, keys) -> tl.tensor:
    """Which keys of a block to load: those that are visible, and the rest of the last 16.

    A mask that may end anywhere would have each thread load its elements one by one; one that ends
    at a multiple of 16 (``keys`` is one, in most models) lets it load them together.
    """
    return (key < (visible + 15) // 16 * 16) & (key < keys)


@triton.jit
def _masked_scores(scores, hidden, hidden_key, key, visible, keys, scale) -> tl.tensor:
    """One block of a row, scaled, in fp32; minus infinity where the query does not see the key."""
    near = _in_reach(key, visible, keys)
    score = tl.load(scores + key, mask=near, other=0.0).to(tl.float32)
    seen = key < visible
    if hidden is not None:
        seen = seen & (tl.load(hidden + key * hidden_key, mask=near, other=1) == 0)
    return tl.where(seen, score * scale, float("-inf"))


@triton.jit
def _attention_softmax_forward(
    scores,  # [B, N, Sq, Sk], becomes the softmax
    hidden,  # bool [B, N, Sq, Sk] of any strides, or None
    heads,
    queries,
    keys,
    scale,
    hidden_batch,  # strides
    hidden_head,
    hidden_query,
    hidden_key,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # row * keys may pass 2^31
    query = row % queries
    head = row // queries
    scores += row * keys
    if hidden is not None:
        hidden += (head // heads) * hidden_batch + (head % heads) * hidden_head
        hidden += query * hidden_query
    visible = _visible_keys(query, queries, keys, CAUSAL)
    maximum = float("-inf")
    total = 0.0
    for start in range(0, visible, BLOCK):
        key = start + tl.arange(0, BLOCK)
        score = _masked_scores(scores, hidden, hidden_key, key, visible, keys, scale)
        larger = tl.maximum(maximum, tl.max(score))
        # A maximum of minus infinity would give the difference of two infinities.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(score - shift))
        maximum = larger
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)  # where no key is seen, of zeros
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        score = _masked_scores(scores, hidden, hidden_key, key, visible, keys, scale)
        weight = tl.exp(score - shift) * share
        tl.store(scores + key, weight.to(scores.dtype.element_ty), mask=key < keys)


@triton.jit
def _attention_softmax_backward(
    weights,  # [B, N, Sq, Sk], becomes the gradient of the scores
    gradient,  # [B, N, Sq, Sk]
    queries,
    keys,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    weights += row * keys
    gradient += row * keys
    visible = _visible_keys(row % queries, queries, keys, CAUSAL)
    # One sum for each place of a block, reduced once.
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, visible, BLOCK):
        key = start + tl.arange(0, BLOCK)
        near = _in_reach(key, visible, keys)
        weight = tl.load(weights + key, mask=near, other=0.0).to(tl.float32)
        slope = tl.load(gradient + key, mask=near, other=0.0).to(tl.float32)
        products += tl.where(key < visible, weight * slope, 0.0)
    mean = tl.sum(products)
    for start in range(0, visible, BLOCK):
        key = start + tl.arange(0, BLOCK)
        near = _in_reach(key, visible, keys)
        weight = tl.load(weights + key, mask=near, other=0.0).to(tl.float32)
        slope = tl.load(gradient + key, mask=near, other=0.0).to(tl.float32)
        result = tl.where(key < visible, scale * weight * (slope - mean), 0.0)
        tl.store(weights + key, result.to(weights.dtype.element_ty), mask=near)


def _blocks(keys: int) -> tuple[int, int]:
    """Keys of a block, and the warps that share one: 16 elements a thread, or one warp."""
    block = min(1 << (keys - 1).bit_length(), _MAX_BLOCK)
    return block, max(1, block // 512)


def _softmax_in_place(scores: Tensor, scale: float, *, causal: bool, hidden: Tensor | None) -> None:
    batch, heads, queries, keys = scores.shape
    block, num_warps = _blocks(keys)
    mask = None if hidden is None else hidden.expand(scores.shape)
    launch: Any = _attention_softmax_forward[(batch * heads * queries,)]
    launch(
        scores,
        mask,
        heads,
        queries,
        keys,
        scale,
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        CAUSAL=causal,
        BLOCK=block,
        num_warps=num_warps,
    )


def _gradient_in_place(weights: Tensor, gradient: Tensor, scale: float, *, causal: bool) -> None:
    queries, keys = weights.shape[-2:]
    block, num_warps = _blocks(keys)
    launch: Any = _attention_softmax_backward[(weights.numel() // keys,)]
    launch(
        weights,
        gradient,
        queries,
        keys,
        scale,
        CAUSAL=causal,
        BLOCK=block,
        num_warps=num_warps,
    )


class _ScaledMaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        scores: Tensor,
        scale: float,
        causal: bool,
        hidden: Tensor | None,
    ) -> Tensor:
        _softmax_in_place(scores, scale, causal=causal, hidden=hidden)
        ctx.mark_dirty(scores)
        ctx.save_for_backward(scores)
        ctx.scale, ctx.causal = scale, causal
        return scores

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        weights = ctx.saved_tensors[0].detach()
        _gradient_in_place(weights, grads[0].contiguous(), ctx.scale, causal=ctx.causal)
        # A second backward, which would find gradients in place of weights, is refused.
        increment_version(weights)
        return weights, None, None, None


def scaled_masked_softmax(
    scores: Tensor, scale: float, *, causal: bool, hidden: Tensor | None = None
) -> Tensor:
    """The softmax over the last dimension of scale * scores, over the keys each query sees.

    The result lies where the scores were; they are gone, and may not be a leaf that wants a
    gradient. Backward in turn overwrites the result, so it runs once, and who keeps the result
    finds gradients there afterwards. That suits ``softmax(q k^T) v``: neither product's backward
    needs the scores, and the second one's is done with the weights when this one begins.

    Args:
        scores: [B, N, Sq, Sk], fp32, bf16 or fp16, contiguous.
        scale: factor on the scores, usually 1 / sqrt(head dimension).
        causal: whether queries see no later keys; the last query is level with the last key.
        hidden: keys that are not seen, bool, broadcast to the scores' shape; None: all are seen.

    Returns:
        Weights, [B, N, Sq, Sk], in the scores' number type; zeros for a query that sees no key.
    """
    assert scores.is_contiguous()
    weights: Tensor = _ScaledMaskedSoftmax.apply(scores, scale, causal, hidden)
    return weights
