"""Root-mean-square normalisation, fused with the residual addition before it.

    stream = x + branch                                  (rounded to their dtype; or x alone)
    normed = stream r weight,   r = 1 / sqrt(mean(stream^2) + epsilon)

Forward reads x and branch once and writes both results once. Backward, with u = stream r and g the
gradient of normed, is one pass as well, the gradient of stream itself added in:

    d stream = r (g weight - u mean(g weight u)) + (gradient of stream)
    d weight = sum over rows of g u

The gradient of x and of branch is d stream, one tensor for both. Kept for backward: stream and r.
All arithmetic is in fp32. Zhang and Sennrich, Root Mean Square Layer Normalization.

Shape legend: M rows (all leading dimensions), H columns.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.row_tiles import row_tiles


@triton.jit
def _rms_norm_forward(
    x,  # [M, H], rows as in _Rows
    branch,  # [M, H] or None
    weight,  # [H]
    stream,  # [M, H] out, or None without a branch
    normed,  # [M, H] out
    scale,  # fp32 [M] out: r
    rows,
    columns,
    group,
    group_stride,
    row_stride,
    epsilon,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    start = (row // group).to(tl.int64) * group_stride + row % group * row_stride
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        value += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, axis=1) / columns + epsilon)
    tl.store(scale + row, r, mask=row < rows)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    result = value * r[:, None] * factor[None, :]
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    grad_normed,  # [M, H]
    grad_stream,  # [M, H] or None
    stream,  # [M, H], rows as in _Rows
    weight,  # [H]
    scale,  # fp32 [M]
    grad_x,  # [M, H] out
    grad_weight,  # fp32 [programs, H] out: a sum over each program's rows
    rows,
    columns,
    group,
    group_stride,
    row_stride,
    tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    column = tl.arange(0, WIDTH)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        start = (row // group).to(tl.int64) * group_stride + row % group * row_stride
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(stream + start[:, None] + column[None, :], mask=inside, other=0.0)
        grad = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        unit = value.to(tl.float32) * r
        total += grad * unit
        grad *= factor[None, :]
        share = tl.sum(grad * unit, axis=1)[:, None] / columns
        result = (grad - unit * share) * r
        if grad_stream is not None:
            result += tl.load(grad_stream + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)
    place = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(grad_weight + place, tl.sum(total, axis=0), mask=column < columns)


class _Rows(NamedTuple):
    """Where the rows of a tensor are: row i is at i // group * group_stride + i % group * stride.

    So heads that are a part of a wider tensor ([S, B, N, D] with the strides of [S, B, 3 N D]) are
    read where they are: a group is the heads of one token.
    """

    values: Tensor
    group: int
    group_stride: int
    row_stride: int


def _rows_of(x: Tensor) -> _Rows:
    if x.ndim == 4 and not x.is_contiguous():
        _, batch, heads, _ = x.shape
        if x.stride(3) == 1 and x.stride(0) == batch * x.stride(1):
            return _Rows(x, heads, x.stride(1), x.stride(2))
    return _Rows(x.contiguous(), 1, x.shape[-1], 0)


def _add_and_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream, normed and r, fp32 [M]."""
    columns = x.shape[-1]
    tiles, rows = row_tiles(x.numel() // columns, columns), _rows_of(x)
    stream = None if branch is None else x.new_empty(x.shape)
    normed = x.new_empty(x.shape)
    scale = x.new_empty(x.numel() // columns, dtype=torch.float32)
    launch: Any = _rms_norm_forward[(tiles.count,)]
    launch(
        rows.values,
        None if branch is None else branch.contiguous(),
        weight,
        stream,
        normed,
        scale,
        len(scale),
        columns,
        rows.group,
        rows.group_stride,
        rows.row_stride,
        epsilon,
        HEIGHT=tiles.height,
        WIDTH=tiles.width,
        num_warps=tiles.warps,
    )
    return x if stream is None else stream, normed, scale


def _gradients(
    grad_normed: Tensor, grad_stream: Tensor | None, stream: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of stream (before the norm), [..., H], and of weight, fp32 [H]."""
    columns = stream.shape[-1]
    tiles, rows = row_tiles(len(scale), columns), _rows_of(stream)
    programs = tiles.programs(stream.device)
    grad_x = stream.new_empty(stream.shape)
    grad_weight = stream.new_empty(programs, columns, dtype=torch.float32)
    launch: Any = _rms_norm_backward[(programs,)]
    launch(
        grad_normed.contiguous(),
        None if grad_stream is None else grad_stream.contiguous(),
        rows.values,
        weight,
        scale,
        grad_x,
        grad_weight,
        len(scale),
        columns,
        rows.group,
        rows.group_stride,
        rows.row_stride,
        tiles.count,
        HEIGHT=tiles.height,
        WIDTH=tiles.width,
        num_warps=tiles.warps,
    )
    return grad_x, grad_weight.sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        stream, normed, scale = _add_and_norm(x, branch, weight, epsilon)
        ctx.save_for_backward(stream, weight, scale)
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
        if grad_normed is not None:
            grad_x, grad_weight = _gradients(grad_normed, grad_x, *ctx.saved_tensors)
        return grad_x, grad_x if ctx.adds else None, grad_weight, None


def rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Adds ``branch`` to ``x`` and normalises the sum's rows.

    Args:
        x: [..., H], fp32, bf16 or fp16. Heads [S, B, N, H] may be a part of a wider tensor, with
            H contiguous and S and B one dimension; anything else is made contiguous first.
        branch: what to add, shape and dtype of ``x``; None: nothing.
        weight: [H], any of these dtypes. Its gradient is fp32.
        epsilon: added to the mean square.

    Returns:
        ``x + branch`` (``x`` itself without a branch) and the normalised sum, of the shape and
        dtype of ``x``. The gradient of ``x`` and of ``branch`` is one tensor, so the backward of
        what made them must not write on it.
    """
    return _RMSNorm.apply(x, branch, weight, epsilon)
