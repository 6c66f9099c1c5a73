"""What the gradient of each parameter looks like, the same in every layout.

Sums over the elements of every parameter are taken on each rank over what it holds, in float64,
and added up over the ranks of its pipeline stage: one table of sums and one of maxima, whatever
the number of parameters. Each element counts once, by the rule of ``lib.optim.clipping``.
"""

import math
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.optim.clipping import counts_here, device_of
from lib.parallel.collectives import all_reduce
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import local

Row = dict[str, str | float | int]


@torch.no_grad()
def gradient_statistics(
    parameters: Mapping[str, nn.Parameter],
    groups: ParallelGroups,
    *,
    loss_scale: float = 1.0,
) -> list[Row]:
    """Looks at all gradients; every rank must call this, with gradients complete.

    Args:
        parameters: those that count on this rank, by global name, in the same order on all ranks
            of a pipeline stage.
        groups: of this rank.
        loss_scale: the factor that the gradients hold; figures are given without it.

    Returns:
        On rank 0 a row for each parameter of all stages that has a gradient, in order of name,
        numbers by value; on other ranks nothing. The columns: ``name``; ``norm``, ``max_abs`` and
        ``mean`` of the finite elements; ``zeros``, the share of
        elements that are exactly 0; ``not_finite``, the number of those that are infinite or NaN.
    """
    device = device_of(parameters.values(), groups.world)
    sums, largest = _stage_table(parameters, device, groups)
    rows = [
        _row(name, counts, top, loss_scale)
        for name, counts, top in zip(parameters, sums.tolist(), largest.tolist(), strict=True)
        if counts[0] > 0
    ]
    return sorted(_gather(rows, groups), key=lambda row: _order(str(row["name"])))


def _stage_table(
    parameters: Mapping[str, nn.Parameter], device: torch.device, groups: ParallelGroups
) -> tuple[Tensor, Tensor]:
    """Sums [parameters, 5] and largest absolute values [parameters] over a pipeline stage."""
    sums = torch.zeros(len(parameters), 5, dtype=torch.float64, device=device)
    largest = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    for place, parameter in enumerate(parameters.values()):
        gradient = parameter.grad
        if gradient is not None and counts_here(gradient):
            _add_up(local(gradient), sums[place], largest[place])
    for group in (groups.tp, groups.dp):
        all_reduce(sums, group)
        all_reduce(largest, group, dist.ReduceOp.MAX)
    return sums, largest


def _add_up(gradient: Tensor, sums: Tensor, largest: Tensor) -> None:
    """Fills in count, zeros, not finite, sum and sum of squares, and the largest value."""
    if not gradient.numel():  # this rank's share of a small parameter
        return
    finite = gradient.nan_to_num(0.0, 0.0, 0.0)
    sums[0] = gradient.numel()
    sums[1] = gradient.eq(0).sum()
    sums[2] = gradient.numel() - gradient.isfinite().sum()
    sums[3] = finite.sum(dtype=torch.float64)
    sums[4] = torch.linalg.vector_norm(finite, dtype=torch.float64).square()
    largest.copy_(finite.abs().max())


def _row(name: str, counts: list[float], largest: float, loss_scale: float) -> Row:
    total, zeros, not_finite, summed, squared = counts
    return {
        "name": name,
        "norm": math.sqrt(squared) / loss_scale,
        "max_abs": largest / loss_scale,
        "mean": summed / max(total - not_finite, 1.0) / loss_scale,
        "zeros": zeros / total,
        "not_finite": int(not_finite),
    }


def _gather(rows: list[Row], groups: ParallelGroups) -> list[Row]:
    """On rank 0 the rows of all pipeline stages, else nothing."""
    speaks = groups.tp.rank == groups.dp.rank == 0
    world = groups.world
    if world.size == 1:
        return rows
    gathered: list[list[Row]] | None = [[] for _ in range(world.size)] if world.rank == 0 else None
    dist.gather_object(rows if speaks else [], gathered, dst=0, group=world.process_group)
    return [row for part in gathered or [] for row in part]


def _order(name: str) -> list[tuple[int, str]]:
    """Sorts by name with numbers by value: layer 10 comes after layer 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
