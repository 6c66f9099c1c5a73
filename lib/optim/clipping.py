"""The global gradient norm, clipping by it, and taking the loss scale off, in one pass.

    norm  = sqrt(sum over all parameters of |g|^2) / loss_scale
    g     = g / loss_scale * min(1, max_norm / (norm + 1e-6))

where ``g`` is what the backward pass left, the gradient of loss_scale times the loss.

Every parameter counts once whatever the layout: a shard counts its own elements, a parameter that
several ranks hold whole counts on the first of them, and a tied copy not at all. Squares are
taken and added in float64: no gradient that fp32 can hold is then too large, so the norm is not
finite exactly where a gradient is not, in every layout and at every loss scale. The sum is taken
once over all ranks, which so agree on an overflow without asking.
"""

import math
from collections.abc import Iterable, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lib.parallel.collectives import all_reduce
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import local

_EPSILON = 1e-6
NO_COPIES: frozenset[nn.Parameter] = frozenset()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    groups: ParallelGroups,
    *,
    copies: Set[nn.Parameter] = NO_COPIES,
    loss_scale: float = 1.0,
) -> float:
    """Unscales all gradients and scales them so that their global norm is at most ``max_norm``.

    Gradients are left alone if the norm is not finite: the caller skips the step.

    Args:
        parameters: this rank's parameters, gradients complete.
        max_norm: the limit; 0 clips nothing.
        groups: of this rank; all ranks of ``groups.world`` must call.
        copies: those of the parameters that count on another pipeline stage.
        loss_scale: the factor that the gradients hold.

    Returns:
        The norm of the unscaled gradient before clipping, the same on every rank.
    """
    held = list(parameters)
    found = [(p, p.grad) for p in held if p.grad is not None]
    gradients = [local(gradient) for _, gradient in found]
    counts = [p not in copies and counts_here(gradient) for p, gradient in found]
    squared = _sum_of_squares(gradients, counts, device_of(held, groups.world))
    norm = math.sqrt(all_reduce(squared, groups.world).item()) / loss_scale
    if not math.isfinite(norm):
        return norm
    factor = min(1.0, max_norm / (norm + _EPSILON)) if max_norm > 0 else 1.0
    factor /= loss_scale
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    return norm


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
    filled = [place for place, gradient in enumerate(gradients) if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    tensors = [gradients[place] for place in filled]
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    counted = torch.tensor([counts[place] for place in filled]).to(device)
    return norms.square().where(counted | ~norms.isfinite(), 0.0).sum()
