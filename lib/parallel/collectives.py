"""Collectives with their gradients; here a group of one process makes each the identity.

Tensor parallelism rests on one conjugate pair (Megatron's f and g):

    copy_to_group      forward: identity            backward: sum over the group
    reduce_from_group  forward: sum over the group  backward: identity

A column-parallel layer enters through the first (each rank's gradient of the shared input is a
partial sum), a row-parallel layer leaves through the second (each rank's output is a partial
sum). In a group of one process every function here returns its input, so no caller branches.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel.groups import Group


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces ``x`` over the group in place, without a gradient; returns ``x``."""
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.process_group)
    return x


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        group: Group,
    ) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        group: Group,
    ) -> Tensor:
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grads[0], None


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Identity whose gradient is summed over the group. Any shape and dtype."""
    return x if group.size == 1 else _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum over the group whose gradient passes unchanged. Any shape and dtype."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)
