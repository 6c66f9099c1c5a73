"""Parameters as stored: how they are cut, and as DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lib.parallel.groups import Group
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import Cut, cut_of, local, replica, shard, store_on_mesh
from tests.distributed import run_on_ranks
from tests.model.models import GPT2, QWEN, build


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_joined_are_the_whole(size, dim):
    full = torch.randn(8, 12)
    groups = [Group(rank, size) for rank in range(size)]
    parts = [Cut((8, 12), dim, group).part_of(full) for group in groups]
    assert torch.equal(torch.cat(parts, dim=dim), full)
    shapes = {tuple(shard((8, 12), dim, group).shape) for group in groups}
    assert shapes == {tuple(parts[0].shape)}
    assert torch.equal(Cut((8, 12), None, groups[-1]).part_of(full), full)


def test_parameters_know_how_they_are_cut():
    group = Group(1, 2)
    assert cut_of(shard((4, 6), 1, group)) == Cut((4, 6), 1, group)
    assert cut_of(replica((5,), group)) == Cut((5,), None, group)
    with pytest.raises(AssertionError):
        shard((5, 6), 0, group)
    with pytest.raises(AssertionError):
        cut_of(nn.Parameter(torch.ones(1)))


def test_local_of_a_plain_tensor_is_itself():
    parameter = nn.Parameter(torch.ones(2))
    assert local(parameter) is parameter


def stored_on_rank(config):
    mesh = build_mesh("cpu", tensor=dist.get_world_size(), pipeline=1, data=1)
    model = build(config, tp=groups_of(mesh).tp)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    dims = {name: cut_of(value).dim for name, value in model.named_parameters()}
    store_on_mesh(model, mesh["tp"])
    for name, value in model.named_parameters():
        assert isinstance(value, nn.Parameter)
        assert isinstance(value.data, DTensor)
        assert value.requires_grad
        assert value.placements == (Replicate() if dims[name] is None else Shard(dims[name]),)
        assert torch.equal(local(value), before[name])
    whole = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
    table = model.embedding.word_embeddings.weight
    local(table).sum().backward()
    return whole, type(table.grad) is DTensor, dims


def plain_on_rank():
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=1)
    model = build(GPT2, tp=groups_of(mesh).tp)
    before = list(model.parameters())
    store_on_mesh(model, mesh["tp"])
    return [now is then for now, then in zip(model.parameters(), before, strict=True)]


def test_on_a_mesh_of_one_process_parameters_stay_plain():
    assert all(run_on_ranks(1, plain_on_rank)[0])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2", "qwen"])
def test_store_on_mesh_keeps_names_values_and_cuts(size, config):
    expected = dict(build(config).named_parameters())
    for whole, gradient_is_stored, dims in run_on_ranks(size, stored_on_rank, config):
        assert gradient_is_stored
        assert list(whole) == list(expected)
        for name, value in expected.items():
            assert torch.equal(whole[name], value.detach())
        assert dims["final_layernorm.weight"] is None
        assert dims["layers.0.mlp.linear_fc2.weight"] == 1
        assert dims["layers.0.mlp.linear_fc1.up.weight"] == 0


class Tied(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.weight = self.second.weight = shard((4, 2), 0, group)
        nn.init.ones_(self.first.weight)


def tied_on_rank():
    mesh = build_mesh("cpu", tensor=2, pipeline=1, data=1)
    model = Tied(groups_of(mesh).tp)
    store_on_mesh(model, mesh["tp"])
    return model.first.weight is model.second.weight, len(list(model.parameters()))


def test_a_tied_parameter_stays_one():
    assert run_on_ranks(2, tied_on_rank) == [(True, 1), (True, 1)]
