"""Tensor-parallel linear layers.

Shape legend: S sequence, B batch, M their product, I input size, O output size, T tensor-parallel
degree.

    ColumnParallelLinear   x_SBI  @ [W1 | W2 | ... | WT]^T   each rank: O/T columns of the output
    RowParallelLinear      [x1 | ... | xT] @ [W1; ...; WT]   each rank: a partial sum, then reduced

A column-parallel layer may hold several maps of the same input ("parts"), such as query, key and
value. They are stored each under a name and with a shape that do not depend on the layout, and
computed as one product.

| tensor | column, local shape | row, local shape |
|---|---|---|
| weight | [O/T, I] | [O, I/T] |
| bias | [O/T] | [O], added on the first rank, before the reduction |
| input | [S, B, I] | [S, B, I/T] |
| output | [S, B, O/T] | [S, B, O] |

Under sequence parallelism the column's input and the row's output are [S/T, B, ...]: the column
gathers its input, and keeps for backward its own part only, to gather it again there.

Communication goes on beside products. Under sequence parallelism:

    column forward   start to gather x; y of the own part; wait; y of the other parts
    column backward  start to gather x; dx = dy @ W; start to sum and scatter dx; wait for x;
                     dW += dy^T @ x; wait for dx
    row forward      y of each other rank's part, sent off while the next is computed; y of the
                     own part; add what was received
    row backward     start to gather dy; dx of the own part; wait; dx of the other parts;
                     dW += dy^T @ x

Without it the row's output is summed at the end of forward, and the column's dx beside dW.

Fewer blocks than ranks (key and value heads): ranks that share a block hold it whole, and each
computes with the block that its own query heads read. So each has a part of the gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.layers.parameter_gradient import overwritable, product_gradient, sum_gradient
from lib.parallel.collectives import (
    Pending,
    all_reduce,
    exchange_parts,
    start_all_reduce,
    start_gather_first_dim,
    start_reduce_scatter_first_dim,
)
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import Cut, replica, shard, stacked


def _rows(x: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return x.reshape(-1, x.shape[-1])


def _gathered_product(
    x: Tensor, multiply: Callable[[Tensor, Tensor], object], columns: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Gathers x along dimension 0 beside a product of each of its rows.

    Args:
        x: this rank's part, [S/T, B, I].
        multiply: writes the product of some rows [M, I] into the second argument, [M, columns].
        columns: of the result.
        group: the ranks.

    Returns:
        The whole product, [S, B, columns], and the whole x, [S, B, I].
    """
    pending = start_gather_first_dim(x, group)
    length = x.shape[0]
    product = x.new_empty((length * group.size, x.shape[1], columns))
    own = slice(group.rank * length, (group.rank + 1) * length)
    multiply(_rows(x), _rows(product[own]))
    whole = pending.wait()
    for others in (slice(0, own.start), slice(own.stop, product.shape[0])):
        if others.start < others.stop:
            multiply(_rows(whole[others]), _rows(product[others]))
    return product, whole


def _parameter_gradients(
    ctx: Any,  # noqa: ANN401
    grad_SBO: Tensor,
    x_SBI: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias, where they are wanted, and were not added to what is there already."""
    _, wants_weight, wants_bias, _ = ctx.needs_input_grad
    grad_MO = _rows(grad_SBO)
    weight_grad = product_gradient(ctx.weight, grad_MO, _rows(x_SBI)) if wants_weight else None
    return weight_grad, sum_gradient(ctx.bias, grad_MO) if wants_bias else None


class _ColumnParallel(torch.autograd.Function):
    """See the table in the module's text."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x_SBI: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: ParallelGroups,
    ) -> Tensor:
        ctx.save_for_backward(x_SBI)
        ctx.weight, ctx.bias, ctx.groups = weight, bias, groups
        if not groups.sequence_parallel:
            return F.linear(x_SBI, weight, bias)

        def multiply(x_MI: Tensor, y_MO: Tensor) -> None:
            if bias is None:
                torch.mm(x_MI, weight.t(), out=y_MO)
            else:
                torch.addmm(bias, x_MI, weight.t(), out=y_MO)

        return _gathered_product(x_SBI, multiply, weight.shape[0], groups.tp)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (x_SBI,), weight, groups = ctx.saved_tensors, ctx.weight, ctx.groups
        wants_input, wants_weight, _, _ = ctx.needs_input_grad
        whole = Pending(x_SBI)
        if groups.sequence_parallel and wants_weight:
            whole = start_gather_first_dim(x_SBI, groups.tp)
        summed: Pending | None = None
        if wants_input:
            start = start_reduce_scatter_first_dim if groups.sequence_parallel else start_all_reduce
            summed = start(grads[0] @ weight, groups.tp)
        parameter_grads = _parameter_gradients(ctx, grads[0], whole.wait())
        return None if summed is None else summed.wait(), *parameter_grads, None


class _RowParallel(torch.autograd.Function):
    """See the table in the module's text."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x_SBI: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: ParallelGroups,
    ) -> Tensor:
        ctx.save_for_backward(x_SBI)
        ctx.weight, ctx.bias, ctx.groups = weight, bias, groups
        added = bias if groups.tp.rank == 0 else None
        if not groups.sequence_parallel:
            return all_reduce(F.linear(x_SBI, weight, added), groups.tp)
        parts = x_SBI.chunk(groups.tp.size)
        return exchange_parts(lambda rank: F.linear(parts[rank], weight, added), groups.tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (x_SBI,), weight, groups = ctx.saved_tensors, ctx.weight, ctx.groups
        (grad_SBO,) = grads
        if groups.sequence_parallel:

            def multiply(grad_MO: Tensor, x_grad_MI: Tensor) -> None:
                torch.mm(grad_MO, weight, out=x_grad_MI)

            columns = weight.shape[1]
            input_grad, grad_SBO = _gathered_product(grad_SBO, multiply, columns, groups.tp)
        else:
            input_grad = grad_SBO @ weight
        return input_grad, *_parameter_gradients(ctx, grad_SBO, x_SBI), None


def column_parallel(
    x_SBI: Tensor, weight: Tensor, bias: Tensor | None, groups: ParallelGroups
) -> Tensor:
    """The local columns of a linear map.

    Args:
        x_SBI: [S, B, I], the same on every tensor-parallel rank; under sequence parallelism this
            rank's part [S/T, B, I].
        weight: this rank's [O/T, I].
        bias: this rank's [O/T], or None.
        groups: groups of this rank.

    Returns:
        [S, B, O/T].
    """
    return _ColumnParallel.apply(x_SBI, weight, bias, groups)


def _columns(shape: tuple[int, ...], blocks: int, group: Group) -> Cut:
    """How ranks share an output of whole blocks; its first dimension is the output's."""
    if blocks % group.size == 0:
        return Cut(shape, 0, group)
    assert group.size % blocks == 0
    block_size = shape[0] // blocks
    first = group.rank * blocks // group.size * block_size
    return Cut(shape, None, group, used=slice(first, first + block_size), sums_gradient=True)


class ColumnParallelLinear(nn.Module):
    """Linear maps of one input, their outputs cut over the tensor-parallel group.

    Args:
        input_size: I.
        parts: by name the output as (blocks, block_size): pieces that no cut may divide, for
            heads (number, head dimension). The number of ranks divides the number of blocks, or
            is a multiple of it.
        groups: groups of this rank.
        bias: whether there are biases.
    """

    def __init__(
        self,
        input_size: int,
        parts: dict[str, tuple[int, int]],
        groups: ParallelGroups,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.groups = groups
        weights = {
            name: _columns((blocks * size, input_size), blocks, groups.tp)
            for name, (blocks, size) in parts.items()
        }
        self.weight = overwritable(stacked(weights))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = stacked(
                {
                    name: _columns((blocks * size,), blocks, groups.tp)
                    for name, (blocks, size) in parts.items()
                }
            )

    def forward(self, x_SBI: Tensor) -> Tensor:
        """The parts' local outputs side by side.

        Args:
            x_SBI: [S, B, I], or under sequence parallelism [S/T, B, I].

        Returns:
            [S, B, sum of the parts' columns]: O/T of each, ``block_size`` of one of fewer blocks
            than ranks.
        """
        return column_parallel(x_SBI, self.weight, self.bias, self.groups)


class RowParallelLinear(nn.Module):
    """A linear map whose input is cut over the tensor-parallel group.

    Args:
        input_size: I; the group's size divides it.
        output_size: O.
        groups: groups of this rank.
        bias: whether there is a bias.
    """

    def __init__(
        self, input_size: int, output_size: int, groups: ParallelGroups, *, bias: bool
    ) -> None:
        super().__init__()
        self.groups = groups
        self.weight = overwritable(shard((output_size, input_size), 1, groups.tp))
        self.bias = replica((output_size,), groups.tp) if bias else None

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Maps the local [S, B, I/T] to [S, B, O], or [S/T, B, O] under sequence parallelism."""
        return _RowParallel.apply(x_SBI, self.weight, self.bias, self.groups)
