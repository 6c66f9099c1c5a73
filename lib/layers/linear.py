"""Tensor-parallel linear layers.

Shape legend: S sequence, B batch, I input size, O output size, T tensor-parallel degree.

    ColumnParallelLinear   x_SBI  @ [W1 | W2 | ... | WT]^T   each rank: O/T columns of the output
    RowParallelLinear      [x1 | ... | xT] @ [W1; ...; WT]   each rank: a partial sum, then reduced

A column-parallel layer may hold several weights ("parts") that read the same input, such as
query, key and value: they share one collective in backward, and each keeps a name and a shape
that do not depend on the layout.

| tensor | column, local shape | row, local shape |
|---|---|---|
| weight | [O/T, I] | [O, I/T] |
| bias | [O/T] | [O], added once after the reduction |
| input | [S, B, I] | [S, B, I/T] |
| output | [S, B, O/T] | [S, B, O] |

Under sequence parallelism the column's input and the row's output are [S/T, B, ...]: the column
gathers its input, and keeps for backward its own part only, to gather it again there.

Backward of a column, with dy the gradients of the parts' outputs:

    (start to gather x)                          sequence parallelism only
    dx = sum over parts of dy_i @ W_i
    start to sum dx over the ranks               all-reduce, or reduce-scatter
    dW_i = dy_i^T @ x,  db_i = sum of dy_i       while the sum is under way
    wait for dx

Fewer blocks than ranks (key and value heads): ranks that share a block compute the same columns of
the output from a weight that they hold whole, and each reads that output with its own query
heads. So the gradients are partial sums again, and are summed over the ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.parallel.collectives import (
    Pending,
    copy_to_group,
    gather_first_dim,
    leave_tensor_parallel,
    start_all_reduce,
    start_gather_first_dim,
    start_reduce_scatter_first_dim,
    sum_partial_gradient,
)
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import local, replica, shard


def _rows(x: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return x.reshape(-1, x.shape[-1])


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum over parts of dy_i @ W_i, [S, B, I]."""
    total = _rows(grads[0]) @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(_rows(grad), weight)
    return total.view(*grads[0].shape[:-1], -1)


class _ColumnParallel(torch.autograd.Function):
    """See the module's text; ``parameters`` are all weights, then all biases (or None)."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        groups: ParallelGroups,
        x_SBI: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        parts = len(parameters) // 2
        weights, biases = parameters[:parts], parameters[parts:]
        ctx.groups = groups
        ctx.save_for_backward(x_SBI, *weights)
        if groups.sequence_parallel:
            x_SBI = gather_first_dim(x_SBI, groups.tp)
        return tuple(
            F.linear(x_SBI, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
            if weight is not None
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x_SBI, *weights = ctx.saved_tensors
        groups, parts = ctx.groups, len(weights)
        _, wants_input, *wants = ctx.needs_input_grad
        whole = Pending(x_SBI)
        if groups.sequence_parallel and any(wants[:parts]):
            whole = start_gather_first_dim(x_SBI, groups.tp)
        summed: Pending | None = None
        if wants_input:
            partial = _input_gradient(grads, weights)
            start = start_reduce_scatter_first_dim if groups.sequence_parallel else start_all_reduce
            summed = start(partial, groups.tp)
        x_rows = _rows(whole.wait())
        weight_grads = [
            _rows(grad).t() @ x_rows if wanted else None
            for grad, wanted in zip(grads, wants[:parts], strict=True)
        ]
        bias_grads = [
            _rows(grad).sum(0) if wanted else None
            for grad, wanted in zip(grads, wants[parts:], strict=True)
        ]
        input_grad = None if summed is None else summed.wait()
        return None, input_grad, *weight_grads, *bias_grads


def column_parallel(
    x_SBI: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    groups: ParallelGroups,
) -> tuple[Tensor, ...]:
    """The local columns of several linear maps of one input.

    Args:
        x_SBI: [S, B, I], the same on every tensor-parallel rank; under sequence parallelism this
            rank's part [S/T, B, I].
        weights: of each part, plain tensors [O, I].
        biases: of each part, [O] or None.
        groups: groups of this rank.

    Returns:
        One [S, B, O] a part. Gradients of weights and biases are this rank's own.
    """
    if groups.tp.size == 1:
        pairs = zip(weights, biases, strict=True)
        return tuple(F.linear(x_SBI, weight, bias) for weight, bias in pairs)
    return _ColumnParallel.apply(groups, x_SBI, *weights, *biases)


class ColumnPart(nn.Module):
    """Weight and bias of one output of a column-parallel layer.

    Args:
        input_size: I.
        blocks: pieces of the output that no cut may divide, such as heads; the number of
            tensor-parallel ranks divides it, or it divides that number.
        block_size: columns of a block.
        group: tensor-parallel group.
        bias: whether there is a bias.
    """

    def __init__(
        self, input_size: int, blocks: int, block_size: int, group: Group, *, bias: bool
    ) -> None:
        super().__init__()
        self.group = group
        self.shared_rows: slice | None = None
        shape = (blocks * block_size, input_size)
        if blocks % group.size == 0:
            self.weight = shard(shape, 0, group)
            self.bias = shard(shape[:1], 0, group) if bias else None
        else:
            assert group.size % blocks == 0
            self.weight = replica(shape, group)
            self.bias = replica(shape[:1], group) if bias else None
            first = group.rank * blocks // group.size * block_size
            self.shared_rows = slice(first, first + block_size)

    def rows(self, parameter: Tensor) -> Tensor:
        """What this rank computes with, of its weight or bias."""
        if self.shared_rows is None:
            return local(parameter)
        return copy_to_group(local(parameter), self.group)[self.shared_rows]


class ColumnParallelLinear(nn.Module):
    """Several linear maps of one input, their outputs cut over the tensor-parallel group.

    Args:
        input_size: I.
        parts: by name the output as (blocks, block_size), for heads (number, head dimension);
            see ``ColumnPart``.
        groups: groups of this rank.
        bias: whether each part has a bias.
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
        self.names = tuple(parts)
        for name, (blocks, block_size) in parts.items():
            part = ColumnPart(input_size, blocks, block_size, groups.tp, bias=bias)
            self.add_module(name, part)

    def forward(self, x_SBI: Tensor) -> tuple[Tensor, ...]:
        """The parts' local outputs, in their order.

        Args:
            x_SBI: [S, B, I], or under sequence parallelism [S/T, B, I].

        Returns:
            One [S, B, O/T] a part; [S, B, block_size] for one of fewer blocks than ranks.
        """
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for name in self.names:
            part = self.get_submodule(name)
            assert isinstance(part, ColumnPart)
            weights.append(part.rows(part.weight))
            biases.append(None if part.bias is None else part.rows(part.bias))
        return column_parallel(x_SBI, weights, biases, self.groups)


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
        self.weight = shard((output_size, input_size), 1, groups.tp)
        self.bias = replica((output_size,), groups.tp) if bias else None

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Maps the local [S, B, I/T] to [S, B, O], or [S/T, B, O] under sequence parallelism."""
        y_SBO = leave_tensor_parallel(F.linear(x_SBI, local(self.weight)), self.groups)
        if self.bias is None:
            return y_SBO
        return y_SBO + sum_partial_gradient(local(self.bias), self.groups)
