"""Masters: each rank has its own shards alone, cut alike in every layout, under their names."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lib.parallel.groups import Group
from lib.parallel.masters import create_masters, fill_shard, gradient_of
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import Cut, local, named_parts
from tests.distributed import run_on_ranks
from tests.model.models import GPT2, QWEN, build
from tests.stored import values_of

# Rows that no number of ranks divides, fewer than ranks, and one; both dimensions cut by tp.
SHAPES = {
    "rows": ((12, 3), 0),
    "columns": ((5, 4), 1),
    "whole": ((7,), None),
    "one": ((1, 2), None),
}
LAYOUTS = {
    "one rank": {"tensor": 1, "data": 1},
    "data 2": {"tensor": 1, "data": 2},
    "data 3": {"tensor": 1, "data": 3},
    "data 4": {"tensor": 1, "data": 4},
    "tensor 2": {"tensor": 2, "data": 1},
    "data 2 x tensor 2": {"tensor": 2, "data": 2},
    "replicas 2 x shards 2": {"tensor": 1, "data": 4, "data_shard": 2},
    "replicas 2 x tensor 2": {"tensor": 2, "data": 2, "data_shard": 1},
}


def full_value(name):
    shape, _ = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def masters_on_rank(layout):
    mesh = build_mesh("cpu", pipeline=1, **layout)
    groups = groups_of(mesh)
    cuts = {name: Cut(shape, dim, groups.tp) for name, (shape, dim) in SHAPES.items()}
    masters = create_masters(cuts, mesh, torch.float64)
    assert list(masters) == list(cuts)
    for name, master in masters.items():
        fill_shard(master, cuts[name].part_of(full_value(name)), mesh)
    found = {}
    for name, master in masters.items():
        assert isinstance(master, nn.Parameter)
        assert isinstance(master.data, DTensor)
        assert (master.dtype, master.requires_grad) == (torch.float64, True)
        assert tuple(master.shape) == SHAPES[name][0]
        shard = local(master.detach())
        gradient = gradient_of(master, shard)
        master.grad = gradient
        assert gradient.placements == master.placements
        assert local(master.grad).data_ptr() == shard.data_ptr()
        assert torch.equal(gradient.full_tensor(), full_value(name))
        part, rank = cuts[name].part_of(full_value(name)), groups.shards.rank
        pieces = part.chunk(groups.shards.size)
        assert shard.untyped_storage().nbytes() <= pieces[0].nbytes  # padded to the largest
        assert torch.equal(shard, pieces[rank] if rank < len(pieces) else part[:0])
        found[name] = master.detach().full_tensor(), shard.numel()
    return found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shards_are_the_whole_in_every_layout(layout):
    size = layout["tensor"] * layout["data"]
    ranks = run_on_ranks(size, masters_on_rank, layout)
    copies = layout["data"] // layout.get("data_shard", layout["data"])
    for name, (_, dim) in SHAPES.items():
        for found in ranks:
            assert torch.equal(found[name][0], full_value(name))
        held = sum(found[name][1] for found in ranks)
        assert held == full_value(name).numel() * copies * (layout["tensor"] if dim is None else 1)


def model_on_rank(config):
    """Masters of a model that tensor-parallel ranks hold, from what each of them was built with."""
    mesh = build_mesh("cpu", tensor=dist.get_world_size(), pipeline=1, data=1)
    groups = groups_of(mesh)
    model = build(config, groups=groups)
    cuts = {name: part.cut for name, part in named_parts(model)}
    masters = create_masters(cuts, mesh, torch.float32)
    for name, value in values_of(model).items():
        fill_shard(masters[name], value, mesh)
        assert (Replicate() in masters[name].placements) == (cuts[name].dim is None)
        assert torch.equal(local(masters[name].detach()), value)
    return {name: master.detach().full_tensor() for name, master in masters.items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2", "qwen"])
def test_masters_keep_names_and_values_of_a_model(size, config):
    expected = values_of(build(config))
    for whole in run_on_ranks(size, model_on_rank, config):
        assert list(whole) == list(expected)
        for name, value in expected.items():
            assert torch.equal(whole[name], value)


def wide_on_rank():
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=2)
    master = create_masters({"x": Cut((4, 2), None, Group())}, mesh, torch.float32)["x"]
    fill_shard(master, torch.full((4, 2), 1 / 3, dtype=torch.float64), mesh)
    return local(master.detach())


def test_values_of_another_type_are_rounded():
    for shard in run_on_ranks(2, wide_on_rank):
        assert shard.dtype == torch.float32
        assert shard.eq(torch.tensor(1 / 3, dtype=torch.float32)).all()
