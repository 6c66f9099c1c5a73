"""How parameters are declared: what ranks hold of them, and the stored ones they are made of."""

import pytest
import torch
from torch import nn

from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import Cut, cuts_of, local, named_parts, replica, shard, stacked
from tests.model.models import GPT2, LLAMA, QWEN, build


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_joined_are_the_whole(size, dim):
    full = torch.randn(8, 12)
    groups = [Group(rank, size) for rank in range(size)]
    cuts = [Cut((8, 12), dim, group) for group in groups]
    parts = [cut.part_of(full) for cut in cuts]
    assert torch.equal(torch.cat(parts, dim=dim), full)
    assert {cut.held_shape for cut in cuts} == {tuple(part.shape) for part in parts}
    shapes = {tuple(shard((8, 12), dim, group).shape) for group in groups}
    assert shapes == {tuple(parts[0].shape)}
    assert torch.equal(Cut((8, 12), None, groups[-1]).part_of(full), full)
    assert Cut((8, 12), None, groups[-1]).held_shape == (8, 12)


def test_a_rank_may_compute_with_some_rows_of_what_it_holds():
    full = torch.randn(8, 12)
    whole, some = Cut((8, 12), 0, Group(1, 2)), Cut((8, 12), None, Group(1, 2), used=slice(2, 5))
    assert torch.equal(whole.used_of(whole.part_of(full)), full[4:])
    assert torch.equal(some.used_of(some.part_of(full)), full[2:5])
    assert (whole.used_rows, some.used_rows) == (4, 3)
    assert some.held_shape == (8, 12)
    some.used_of(full).zero_()  # a view
    assert full[2:5].eq(0).all()


def test_parameters_know_how_they_are_cut():
    group = Group(1, 2)
    assert cuts_of(shard((4, 6), 1, group)) == {"": Cut((4, 6), 1, group)}
    assert cuts_of(replica((5,), group)) == {"": Cut((5,), None, group)}
    summed = replica((5,), group, sums_gradient=True)
    assert cuts_of(summed) == {"": Cut((5,), None, group, sums_gradient=True)}
    with pytest.raises(AssertionError):
        shard((5, 6), 0, group)
    with pytest.raises(AssertionError):
        cuts_of(nn.Parameter(torch.ones(1)))


class Stack(nn.Module):
    """A weight of three stored ones, on rank 1 of 4: cut, held whole, and cut."""

    def __init__(self):
        super().__init__()
        group = Group(1, 4)
        self.cuts = {
            "q": Cut((8, 3), 0, group),
            "k": Cut((6, 3), None, group, used=slice(3, 6)),
            "v": Cut((4, 3), 0, group),
        }
        self.weight = stacked(self.cuts)
        self.scale = replica((5,), group)


def test_stored_parameters_lie_one_below_the_other():
    module = nn.Sequential(Stack())
    (stack,) = module
    assert stack.weight.shape == (2 + 3 + 1, 3)
    parts = dict(named_parts(module))
    assert list(parts) == ["0.q.weight", "0.k.weight", "0.v.weight", "0.scale"]
    assert [part.cut for part in parts.values()][:3] == list(stack.cuts.values())
    rows = {"0.q.weight": slice(0, 2), "0.k.weight": slice(2, 5), "0.v.weight": slice(5, 6)}
    for name, place in rows.items():
        part = parts[name]
        assert (part.owner, part.attribute, part.rows) == (stack, "weight", place)
        assert part.grad is None
        part.value.fill_(place.start)
        assert stack.weight[place].eq(place.start).all()
    assert not parts["0.k.weight"].value.requires_grad
    stack.weight.grad = torch.arange(18.0).view(6, 3)
    assert torch.equal(parts["0.k.weight"].grad, stack.weight.grad[2:5])


def test_a_part_follows_the_parameter_of_its_owner():
    stack = Stack()
    part = dict(named_parts(stack))["v.weight"]
    other = nn.Parameter(torch.ones(6, 3))
    stack.weight = other
    part.value.zero_()
    assert other.sum().item() == 15.0


def test_local_of_a_plain_tensor_is_itself():
    parameter = nn.Parameter(torch.ones(2))
    assert local(parameter) is parameter


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN], ids=["gpt2", "llama", "qwen"])
def test_stored_names_and_shapes_are_those_of_one_rank_in_every_layout(size, config):
    whole = {name: part.cut.full_shape for name, part in named_parts(build(config))}
    for rank in range(size):
        model = build(config, groups=ParallelGroups(tp=Group(rank, size)))
        parts = dict(named_parts(model))
        assert {name: part.cut.full_shape for name, part in parts.items()} == whole
        assert list(parts) == list(whole)
        assert parts["final_layernorm.weight"].cut.dim is None
        assert parts["layers.0.mlp.linear_fc2.weight"].cut.dim == 1
        assert parts["layers.0.mlp.linear_fc1.up.weight"].cut.dim == 0
        shared = config.num_query_groups < size
        key = parts["layers.0.self_attention.linear_qkv.k.weight"].cut
        assert (key.dim, key.sums_gradient) == ((None, True) if shared else (0, False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.weight = self.second.weight = shard((4, 2), 0, Group(0, 2))


def test_a_tied_parameter_is_one():
    assert [name for name, _ in named_parts(Tied())] == ["first.weight"]
