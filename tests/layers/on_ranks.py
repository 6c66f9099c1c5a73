"""What tests of layers do on each rank: groups, drawn numbers, filling and comparing."""

import torch
import torch.distributed as dist

from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.random import shard_stream
from lib.parallel.storage import named_parts
from tests import stored

CPU = torch.device("cpu")


def tensor_groups(*, sequence=False, watch=None):
    """All ranks as one tensor-parallel group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        dist.barrier()  # a rank that talks to nobody could leave while another one still connects
    process_group = dist.group.WORLD if size > 1 else None
    stream = shard_stream(5, CPU, dp_rank=0, pp_rank=0, tp_rank=rank) if size > 1 else None
    return ParallelGroups(
        tp=Group(rank, size, process_group, "tp", watch),
        sequence_parallel=sequence,
        shard_stream=stream,
    )


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(layer, values, dtype=torch.float64):
    """Gives a layer this rank's parts of whole values by stored name."""
    assert {name for name, _ in named_parts(layer)} == set(values)
    stored.fill(layer, values, dtype)


def cut_sequence(whole, groups):
    """This rank's part of an activation between layers."""
    return whole.chunk(groups.tp.size)[groups.tp.rank] if groups.sequence_parallel else whole


def gradients(layer):
    """By stored name, complete: parts are summed over the ranks."""
    return stored.gradients_of(layer)


def cuts(layer):
    return {name: part.cut.dim for name, part in named_parts(layer)}


def assert_close(found, expected, tolerance=1e-12):
    """Equal up to a share of the largest element."""
    assert found.shape == expected.shape
    difference = (found.double() - expected).abs().max().item()
    assert difference <= tolerance * expected.abs().max().item(), difference


def join_activations(parts, *, sequence):
    """The whole of an activation between layers; without SP every rank must have the same."""
    if sequence:
        return torch.cat(parts)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


def join_parameters(parts, dim):
    """The whole of a parameter's gradient; copies must have the same bits on every rank."""
    if dim is not None:
        return torch.cat(parts, dim=dim)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]
