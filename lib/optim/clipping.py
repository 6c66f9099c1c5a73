"""The global gradient norm, clipping by it, and taking the loss scale off.

    norm  = sqrt(sum over all parameters of |g|^2) / loss_scale
    g     = g / (loss_scale * max(1, (norm + 1e-6) / max_norm))

where ``g`` is what the backward pass left, the gradient of loss_scale times the loss.

Every parameter counts once whatever the layout: a shard counts its own elements, a parameter that
several ranks hold whole counts on the first of them, and a tied copy not at all. Squares are
taken and added in float64: no gradient that fp32 can hold is then too large, so the norm is not
finite exactly where a gradient is not, in every layout and at every loss scale. The sum is taken
once over all ranks, which so agree on an overflow without asking.
"""

from collections.abc import Iterable, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lib.parallel.collectives import all_reduce
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import local

_EPSILON = 1e-6
_NO_COPIES: frozenset[nn.Parameter] = frozenset()


@torch.no_grad()
def squared_norm(
    parameters: Iterable[nn.Parameter],
    groups: ParallelGroups,
    *,
    copies: Set[nn.Parameter] = _NO_COPIES,
) -> Tensor:
    """The sum of the squares of all gradients, as the backward pass left them.

    Args:
        parameters: this rank's parameters, gradients complete.
        groups: of this rank; all ranks of ``groups.world`` must call.
        copies: those of the parameters that count on another pipeline stage.

    Returns:
        A float64 scalar on the parameters' device, which the host has not waited for, the same on
        every rank; not finite if any gradient is not.
    """
    held = list(parameters)
    found = [(p, p.grad) for p in held if p.grad is not None]
    gradients = [local(gradient) for _, gradient in found]
    counts = [p not in copies and counts_here(gradient) for p, gradient in found]
    squared = _sum_of_squares(gradients, counts, device_of(held, groups.world))
    return all_reduce(squared, groups.world)


def clipping_divisor(squared: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """What gradients are to be divided by: unscales them, and limits their norm.

    Args:
        squared: from ``squared_norm``.
        max_norm: the limit of the unscaled gradient's norm; 0 clips nothing.
        loss_scale: the factor that the gradients hold.

    Returns:
        A scalar of the same dtype and device; of no use where ``squared`` is not finite.
    """
    if max_norm <= 0:
        return torch.full_like(squared, loss_scale)
    norm = squared.sqrt() / loss_scale
    return ((norm + _EPSILON) / max_norm).clamp(min=1.0) * loss_scale


def counts_here(gradient: Tensor) -> bool:
    """Whether this rank's part is to be counted: of ranks that hold the same, the first one's."""
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    assert not any(isinstance(placement, Partial) for placement in gradient.placements)
    return all(
        rank == 0
        for placement, rank in zip(gradient.placements, coordinate, strict=True)
        if isinstance(placement, Replicate)
    )


def device_of(parameters: Iterable[nn.Parameter], group: Group) -> torch.device:
    """Where to put a tensor that is reduced over ``group``, of which some may hold no parameter."""
    for parameter in parameters:
        return parameter.device
    backend = dist.get_backend(group.process_group) if group.process_group is not None else ""
    return torch.device("cuda" if "nccl" in backend else "cpu")


def _sum_of_squares(gradients: list[Tensor], counts: list[bool], device: torch.device) -> Tensor:
    """A float64 scalar; infinite or NaN if any gradient is, even one that does not count."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for does_count in (True, False):
        chosen = [
            gradient
            for gradient, counted in zip(gradients, counts, strict=True)
            if counted is does_count and gradient.numel()
        ]
        if chosen:
            norms = torch.stack(torch._foreach_norm(chosen, 2, dtype=torch.float64))
            counted = norms.square() if does_count else norms.where(~norms.isfinite(), 0.0)
            total += counted.sum()
    return total
