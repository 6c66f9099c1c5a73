"""Collectives with their gradients; here a group of one process makes each the identity.

A tensor-parallel layer leaves partial sums on its ranks. What becomes of them, and of the gradient
(Megatron's mappings), for activations that every rank holds whole, and for those cut along
dimension 0 (sequence parallelism):

| function | forward | backward |
|---|---|---|
| reduce_from_group | sum over the group | identity |
| reduce_scatter_to_sequence | sum, each rank keeps its part | join the parts |

Linear layers do the same by the raw collectives, beside their products (``lib.layers.linear``). In
a group of one process every function here returns its input, so no caller branches.

The raw collectives have no gradient. Those named ``start_`` return at once, so that work goes on
beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel.groups import Group, ParallelGroups

# Torch 2.13 renamed these two; the old names still work, with a warning at each use.
_NEW_NAMES = hasattr(dist, "all_gather_single")
_ALL_GATHER: Callable[..., dist.Work | None] = (
    dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
)
_REDUCE_SCATTER: Callable[..., dist.Work | None] = (
    dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
)


@dataclass(frozen=True)
class Pending:
    """A collective under way; its tensor holds the result after ``wait`` only."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """The result. On a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def _announce(call: str, x: Tensor, group: Group) -> None:
    if group.watch is not None:
        group.watch(call, x)


def _reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType, *, asynchronous: bool) -> Pending:
    if group.size == 1:
        return Pending(x)
    _announce("all_reduce", x, group)
    return Pending(x, dist.all_reduce(x, op=op, group=group.process_group, async_op=asynchronous))


def _gather(x: Tensor, group: Group, *, asynchronous: bool) -> Pending:
    if group.size == 1:
        return Pending(x)
    x = x.contiguous()
    whole = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    _announce("all_gather", x, group)
    work = _ALL_GATHER(whole, x, group=group.process_group, async_op=asynchronous)
    return Pending(whole, work)


def _reduce_scatter(
    x: Tensor, group: Group, part: Tensor | None = None, *, asynchronous: bool
) -> Pending:
    if group.size == 1:
        return Pending(x)
    assert x.shape[0] % group.size == 0
    x = x.contiguous()
    if part is None:
        part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    _announce("reduce_scatter", x, group)
    work = _REDUCE_SCATTER(part, x, group=group.process_group, async_op=asynchronous)
    return Pending(part, work)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces ``x`` over the group in place, without a gradient; returns ``x``."""
    return _reduce(x, group, op, asynchronous=False).wait()


def gather_first_dim(x: Tensor, group: Group) -> Tensor:
    """The parts of all ranks joined along dimension 0, in order of rank, without a gradient."""
    return _gather(x, group, asynchronous=False).wait()


def reduce_scatter_first_dim(x: Tensor, group: Group) -> Tensor:
    """This rank's part along dimension 0 of the sum over the group, without a gradient."""
    return _reduce_scatter(x, group, asynchronous=False).wait()


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """Starts ``all_reduce``, a sum; ``x`` is not to be read or changed before ``wait``."""
    return _reduce(x, group, dist.ReduceOp.SUM, asynchronous=True)


def start_gather_first_dim(x: Tensor, group: Group) -> Pending:
    """Starts ``gather_first_dim``; ``x`` is not to be changed before ``wait``."""
    return _gather(x, group, asynchronous=True)


def start_reduce_scatter_first_dim(x: Tensor, group: Group, part: Tensor | None = None) -> Pending:
    """Starts ``reduce_scatter_first_dim``; ``x`` is not to be changed before ``wait``.

    The result is written into ``part`` if there is one and the group has several ranks.
    """
    return _reduce_scatter(x, group, part, asynchronous=True)


def exchange_parts(compute: Callable[[int], Tensor], group: Group) -> Tensor:
    """This rank's part of a sum over the group, whose terms are computed part by part.

    What ``reduce_scatter_first_dim`` gives, but each part is on its way to the rank that it
    belongs to while the next one is computed; the own part, which goes nowhere, comes last.

    Args:
        compute: gives this rank's term of the part of a rank, all of one shape.
        group: the ranks that sum.
    """
    arriving: list[Pending] = []
    for step in range(1, group.size):
        to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
        leaving = compute(to)
        sent, received = [0] * group.size, [0] * group.size
        sent[to] = received[source] = leaving.shape[0]
        part = torch.empty_like(leaving)
        _announce("exchange", leaving, group)
        work = dist.all_to_all_single(
            part, leaving, received, sent, group=group.process_group, async_op=True
        )
        arriving.append(Pending(part, work))
    total = compute(group.rank)
    for pending in arriving:
        total += pending.wait()
    return total


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        group: Group,
    ) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grads[0], None


class _ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        group: Group,
    ) -> Tensor:
        ctx.group = group
        return reduce_scatter_first_dim(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gather_first_dim(grads[0], ctx.group), None


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum over the group whose gradient passes unchanged. Any shape and dtype."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)


def reduce_scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """This rank's part [S/T, ...] of the sum of [S, ...]; its gradient is joined.

    The group's size divides S.
    """
    return x if group.size == 1 else _ReduceScatterToSequence.apply(x, group)


def leave_tensor_parallel(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Turns partial sums [S, ...] of the tensor-parallel ranks into the activation between layers.

    Returns:
        The sum, whole on every rank, or under sequence parallelism this rank's part of it,
        [S/T, ...].
    """
    if groups.sequence_parallel:
        return reduce_scatter_to_sequence(x, groups.tp)
    return reduce_from_group(x, groups.tp)
