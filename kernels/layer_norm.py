"""Layer normalisation, fused with the residual addition before it.

    stream = x + branch                                  (rounded to their dtype; or x alone)
    normed = u weight + bias,   u = (stream - mean) r,   r = 1 / sqrt(variance + epsilon)

Forward reads x and branch once and writes both results once; the variance is that of the centred
row, which is in registers, so a large mean does no harm. Backward, with g the gradient of normed,
is one pass as well, the gradient of stream itself added in:

    d stream = r (g weight - mean(g weight) - u mean(g weight u)) + (gradient of stream)
    d weight = sum over rows of g u
    d bias   = sum over rows of g

Products are rounded before they are added or subtracted (no fused multiply-add): where a row has
one element, g weight less its mean is then exactly 0, and not a rounding error that r enlarges.

The gradient of x and of branch is d stream, one tensor for both. Kept for backward: stream, mean
and r. All arithmetic is in fp32. Ba, Kiros and Hinton, Layer Normalization.

Shape legend: M rows (all leading dimensions), H columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.row_tiles import row_tiles


@triton.jit
def _layer_norm_forward(
    x,  # [M, H]
    branch,  # [M, H] or None
    weight,  # [H]
    bias,  # [H]
    stream,  # [M, H] out, or None without a branch
    normed,  # [M, H] out
    statistics,  # fp32 [2, M] out: mean, r
    rows,
    columns,
    epsilon,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        value += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    # Rounded correctly: what / leaves of a value less its mean is large against a small variance.
    mean = tl.div_rn(tl.sum(value, axis=1), 1.0 * columns)
    centred = tl.where(inside, value - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=1) / columns + epsilon)
    tl.store(statistics + row, mean, mask=row < rows)
    tl.store(statistics + rows + row, r, mask=row < rows)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    result = centred * r[:, None] * factor[None, :] + shift[None, :]
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_backward(
    grad_normed,  # [M, H]
    grad_stream,  # [M, H] or None
    stream,  # [M, H]
    weight,  # [H]
    statistics,  # fp32 [2, M]
    grad_x,  # [M, H] out
    totals,  # fp32 [programs, 2, H] out: gradients of weight and bias by each program's rows
    rows,
    columns,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    column = tl.arange(0, WIDTH)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    weight_total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    bias_total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
        r = tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None]
        unit = (value - mean) * r  # not zero beyond the columns, but the gradient is
        weight_total += grad * unit
        bias_total += grad
        grad *= factor[None, :]
        level = tl.div_rn(tl.sum(grad, axis=1)[:, None], 1.0 * columns)
        share = tl.sum(grad * unit, axis=1)[:, None] / columns
        result = (grad - level - unit * share) * r
        if grad_stream is not None:
            result += tl.load(grad_stream + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)
    place = tl.program_id(0).to(tl.int64) * 2 * columns + column
    tl.store(totals + place, tl.sum(weight_total, axis=0), mask=column < columns)
    tl.store(totals + place + columns, tl.sum(bias_total, axis=0), mask=column < columns)


def _add_and_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream, normed, and mean and r, fp32 [2, M]."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    tiles = row_tiles(rows, columns)
    stream = None if branch is None else x.new_empty(x.shape)
    normed = x.new_empty(x.shape)
    statistics = x.new_empty(2, rows, dtype=torch.float32)
    launch: Any = _layer_norm_forward[(tiles.count,)]
    launch(
        x.contiguous(),
        None if branch is None else branch.contiguous(),
        weight,
        bias,
        stream,
        normed,
        statistics,
        rows,
        columns,
        epsilon,
        HEIGHT=tiles.height,
        WIDTH=tiles.width,
        num_warps=tiles.warps,
        enable_fp_fusion=False,
    )
    return x if stream is None else stream, normed, statistics


def _gradients(
    grad_normed: Tensor,
    grad_stream: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    statistics: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of stream (before the norm), [..., H], and of weight and bias, fp32 [H]."""
    rows, columns = statistics.shape[1], stream.shape[-1]
    tiles = row_tiles(rows, columns)
    programs = tiles.programs(stream.device)
    grad_x = stream.new_empty(stream.shape)
    # Both of a program side by side: one sum over the outermost dimension, torch's fastest.
    totals = stream.new_empty(programs, 2, columns, dtype=torch.float32)
    launch: Any = _layer_norm_backward[(programs,)]
    launch(
        grad_normed.contiguous(),
        None if grad_stream is None else grad_stream.contiguous(),
        stream.contiguous(),
        weight,
        statistics,
        grad_x,
        totals,
        rows,
        columns,
        tiles.count,
        HEIGHT=tiles.height,
        WIDTH=tiles.width,
        num_warps=tiles.warps,
        enable_fp_fusion=False,
    )
    grad_weight, grad_bias = totals.sum(0)
    return grad_x, grad_weight, grad_bias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        stream, normed, statistics = _add_and_norm(x, branch, weight, bias, epsilon)
        ctx.save_for_backward(stream, weight, statistics)
        ctx.adds = branch is not None
        ctx.set_materialize_grads(False)  # an output that nothing uses costs nothing
        return stream, normed

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        grad_x, grad_normed = grads
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        if grad_normed is not None:
            grad_x, grad_weight, grad_bias = _gradients(grad_normed, grad_x, *ctx.saved_tensors)
        return grad_x, grad_x if ctx.adds else None, grad_weight, grad_bias, None


def layer_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Adds ``branch`` to ``x`` and normalises the sum's rows.

    Args:
        x: [..., H], fp32, bf16 or fp16; made contiguous first where it is not.
        branch: what to add, shape and dtype of ``x``; None: nothing.
        weight: [H], any of these dtypes. Its gradient is fp32.
        bias: [H], likewise.
        epsilon: added to the variance.

    Returns:
        ``x + branch`` (``x`` itself without a branch) and the normalised sum, of the shape and
        dtype of ``x``. The gradient of ``x`` and of ``branch`` is one tensor, so the backward of
        what made them must not write on it.
    """
    return _LayerNorm.apply(x, branch, weight, bias, epsilon)
