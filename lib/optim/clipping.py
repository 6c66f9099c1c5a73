"""The global gradient norm and clipping by it.

    norm  = sqrt(sum over all parameters of |g|^2)
    g     = g * min(1, max_norm / (norm + 1e-6))

Every parameter counts once whatever the layout: a shard counts its own elements, and a parameter
that all tensor-parallel ranks hold whole counts on the first of them only.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lib.parallel.collectives import all_reduce
from lib.parallel.groups import ParallelGroups

_EPSILON = 1e-6


def _counts_here(gradient: DTensor | Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        rank == 0
        for placement, rank in zip(gradient.placements, coordinate, strict=True)
        if isinstance(placement, Replicate)
    )


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, bool]]:
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        plain = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        found.append((plain, _counts_here(gradient)))
    return found


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, groups: ParallelGroups
) -> float:
    """Scales all gradients so that their global norm is at most ``max_norm``.

    Args:
        parameters: this rank's parameters, gradients complete.
        max_norm: the limit; 0 measures the norm and clips nothing.
        groups: over which the squared norms are summed.

    Returns:
        The norm before clipping, the same on every rank.
    """
    gradients = _local_gradients(parameters)
    counted = [gradient for gradient, counts in gradients if counts and gradient.numel()]
    device = gradients[0][0].device
    squared = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        squared = nn.utils.get_total_norm(counted).double().square()
    for group in (groups.tp, groups.dp, groups.pp):
        squared = all_reduce(squared, group)
    norm = squared.sqrt().item()
    scale = max_norm / (norm + _EPSILON) if max_norm > 0 else 1.0
    if scale < 1.0:
        torch._foreach_mul_([gradient for gradient, _ in gradients], scale)
    return norm
