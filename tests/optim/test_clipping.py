"""Gradient clipping against torch's, at any loss scale, and over shards of every kind."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.parallel.data_parallel import DataParallel, Unit
from lib.parallel.groups import ParallelGroups
from lib.parallel.masters import create_masters
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import Cut, local, named_parts, replica, shard
from tests.distributed import run_on_ranks
from tests.optim.clipped import clip_gradients


def parameters_with(gradients):
    found = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        found.append(parameter)
    return found


def drawn():
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((4, 6), (6,), (2, 2), (1,))
    ]


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 5.0, 100.0])
def test_equals_torchs(max_norm):
    ours, theirs = parameters_with(drawn()), parameters_with(drawn())
    norm = clip_gradients(ours, max_norm, ParallelGroups())
    assert math.isclose(norm, nn.utils.clip_grad_norm_(theirs, max_norm).item(), rel_tol=1e-12)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)
    if norm > max_norm:
        after = math.sqrt(sum(p.grad.square().sum().item() for p in ours))
        assert math.isclose(after, max_norm * norm / (norm + 1e-6), rel_tol=1e-12)


def test_a_limit_of_0_measures_only():
    parameters = parameters_with(drawn())
    norm = clip_gradients(parameters, 0.0, ParallelGroups())
    assert math.isclose(norm, torch.cat([g.reshape(-1) for g in drawn()]).norm().item())
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, drawn(), strict=True))


def test_hand_value():
    parameters = parameters_with([torch.tensor([3.0]), torch.tensor([[4.0]])])
    assert clip_gradients(parameters, 1.0, ParallelGroups()) == 5.0
    assert parameters[0].grad.item() == pytest.approx(0.6, rel=1e-6)
    assert parameters[1].grad.item() == pytest.approx(0.8, rel=1e-6)


def test_zero_gradients_stay_zero_and_parameters_without_any_are_left_out():
    parameters = [*parameters_with([torch.zeros(3)]), nn.Parameter(torch.ones(2))]
    assert clip_gradients(parameters, 1.0, ParallelGroups()) == 0.0
    assert parameters[0].grad.eq(0).all()
    assert parameters[1].grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("counted", [True, False])
def test_a_gradient_that_is_no_number_shows_in_the_norm_and_stays(bad, counted):
    gradients = [torch.tensor([1.0, bad]), torch.tensor([2.0, 3.0])]
    parameters = parameters_with(gradients)
    copies = frozenset() if counted else frozenset(parameters)
    norm = clip_gradients(parameters, 1.0, ParallelGroups(), copies=copies, loss_scale=8.0)
    assert str(norm) == str(bad)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


def test_no_parameters():
    assert clip_gradients([], 1.0, ParallelGroups()) == 0.0


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e3])
@pytest.mark.parametrize("exponent", [0, 1, 16, 32])
def test_the_loss_scale_changes_not_one_bit(max_norm, exponent):
    plain = [gradient.float() for gradient in drawn()]
    unscaled, scaled = parameters_with(plain), parameters_with([g * 2.0**exponent for g in plain])
    norm = clip_gradients(unscaled, max_norm, ParallelGroups())
    assert norm == clip_gradients(scaled, max_norm, ParallelGroups(), loss_scale=2.0**exponent)
    for one, other in zip(unscaled, scaled, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e30, 3e38])
def test_squares_beyond_fp32_are_counted(value):
    """In fp32 the squares are 0 or infinite; the norm is sqrt(3 + 1) times the value."""
    parameters = parameters_with([torch.full((3,), value), torch.full((1,), -value)])
    norm = clip_gradients(parameters, 0.0, ParallelGroups(), loss_scale=value)
    assert norm == pytest.approx(2.0, rel=1e-6)  # what fp32 makes of the value


def test_a_small_gradient_beside_a_large_one_is_not_lost():
    """4096 elements of 1 beside one of 2^13: an fp32 sum of squares drops every second 1."""
    parameters = parameters_with([torch.tensor([2.0**13]), torch.ones(4096)])
    assert clip_gradients(parameters, 0.0, ParallelGroups()) == math.sqrt(2.0**26 + 4096)


def test_tied_copies_are_scaled_but_not_counted():
    parameters = parameters_with([torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])])
    copies = {parameters[1]}
    norm = clip_gradients(parameters, 1.0, ParallelGroups(), copies=copies, loss_scale=2.0)
    assert norm == 2.5
    factor = 0.5 / (2.5 + 1e-6)
    assert parameters[1].grad.tolist() == pytest.approx([30 * factor, 40 * factor], rel=1e-6)


# How the tensor-parallel group cuts each: along a dimension, or not.
_SHAPES = {"column": (8, 6), "row": (6, 8), "table": (12, 3), "norm": (5,), "tiny": (1,)}
_CUTS = {"column": 0, "row": 1, "table": 0, "norm": None, "tiny": None}
_STAGES = [{"column", "norm", "table"}, {"row", "tiny", "table"}]  # of two; the table is tied


def full_gradients(dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in _SHAPES.items()
    }


class Given(nn.Module):
    """A model whose gradients are ``gradients``, as the parallel engine reduces them."""

    def __init__(self, gradients, groups):
        super().__init__()
        self.copies = groups.dp.size
        self.gradients = {}
        for name, gradient in gradients.items():
            cut = Cut(_SHAPES[name], _CUTS[name], groups.tp)
            self.gradients[name] = cut.part_of(gradient)
            parameter = replica(_SHAPES[name], groups.tp)
            if cut.dim is not None:
                parameter = shard(_SHAPES[name], cut.dim, groups.tp)
            self.register_parameter(name, parameter)

    def forward(self):
        parameters = self.named_parameters()
        return sum((p * self.gradients[name]).sum() for name, p in parameters) / self.copies


def masters_on_rank(layout, dtype):
    """Masters of this rank's stage of ``Given``, with gradients; groups; which are tied copies."""
    mesh = build_mesh("cpu", **layout)
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    names = _STAGES[stage] if stages == 2 else _SHAPES.keys()
    gradients = {name: full_gradients(dtype)[name] for name in _SHAPES if name in names}
    groups = groups_of(mesh)
    model = Given(gradients, groups)
    parts = dict(named_parts(model))
    masters = create_masters({name: part.cut for name, part in parts.items()}, mesh, dtype)
    for master in masters.values():
        nn.init.zeros_(local(master.detach()))
    unit = Unit((model,), lasts=True)
    engine = DataParallel([[unit]], parts, masters, dtype, groups, "optimizer")
    engine.start(trains=True)
    engine.before_backward(0, is_last=True)
    model().backward()
    engine.after_backward(0)
    engine.finish()
    copies = {masters["table"]} if stage == 1 else set()
    return masters, groups, copies


def clip_on_rank(layout, max_norm):
    masters, groups, copies = masters_on_rank(layout, torch.float64)
    scale = 2.0**20
    for parameter in masters.values():
        local(parameter.grad).mul_(scale)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        norm = clip_gradients(masters.values(), max_norm, groups, copies=copies, loss_scale=scale)
    clipped = {name: value.grad.full_tensor() for name, value in masters.items()}
    kinds = {type(place).__name__ for p in masters.values() for place in p.grad.placements}
    return norm, clipped, sums.call_count, kinds


LAYOUTS = {
    "one rank": {"tensor": 1, "pipeline": 1, "data": 1},
    "data 2": {"tensor": 1, "pipeline": 1, "data": 2},
    "data 3": {"tensor": 1, "pipeline": 1, "data": 3},
    "tensor 2": {"tensor": 2, "pipeline": 1, "data": 1},
    "pipeline 2": {"tensor": 1, "pipeline": 2, "data": 1},
    "data 2 x tensor 2": {"tensor": 2, "pipeline": 1, "data": 2},
    "replicas 2 x shards 2": {"tensor": 1, "pipeline": 1, "data": 4, "data_shard": 2},
    "replicas 2 x tensor 2": {"tensor": 2, "pipeline": 1, "data": 2, "data_shard": 1},
    "pipeline 2 x tensor 2": {"tensor": 2, "pipeline": 2, "data": 1},
    "all": {"tensor": 2, "pipeline": 2, "data": 2, "data_shard": 1},
}


def size_of(layout):
    return layout["tensor"] * layout["pipeline"] * layout["data"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.layouts] if size_of(layout) > 4 else [])
        for layout in LAYOUTS.values()
    ],
    ids=LAYOUTS.keys(),
)
def test_every_element_counts_once_in_every_layout(layout):
    full = full_gradients()
    truth = torch.cat([g.reshape(-1) for g in full.values()]).norm().item()
    ranks = run_on_ranks(size_of(layout), clip_on_rank, layout, 2.0)
    assert len({norm for norm, *_ in ranks}) == 1
    for norm, clipped, sums, _ in ranks:
        assert math.isclose(norm, truth, rel_tol=1e-12)
        assert sums == (len(ranks) > 1)
        for name, value in clipped.items():
            torch.testing.assert_close(value, full[name] * 2.0 / (truth + 1e-6), rtol=1e-12, atol=0)
    assert {name for _, clipped, *_ in ranks for name in clipped} == set(full)


def test_the_layouts_have_every_kind_of_placement():
    layout = LAYOUTS["data 2 x tensor 2"]
    kinds = run_on_ranks(4, clip_on_rank, layout, 2.0)[0][3]
    assert kinds == {"Shard", "_StridedShard", "Replicate"}


def spoil_on_rank(layout, rank, name, value):
    """One value on one rank is spoilt."""
    masters, groups, copies = masters_on_rank(layout, torch.float32)
    if dist.get_rank() == rank:
        local(masters[name].grad).view(-1)[0] = value
    before = [local(p.grad).clone() for p in masters.values()]
    norm = clip_gradients(masters.values(), 1.0, groups, copies=copies, loss_scale=4.0)
    after = [local(p.grad) for p in masters.values()]
    pairs = zip(before, after, strict=True)
    return norm, all(torch.equal(b.nan_to_num(), a.nan_to_num()) for b, a in pairs)


@pytest.mark.parametrize(
    ("layout", "rank", "name"),
    [
        ("data 2", 1, "column"),
        ("tensor 2", 1, "norm"),  # a replica, which does not count
        ("pipeline 2", 1, "table"),  # a tied copy, which does not count
        ("replicas 2 x shards 2", 2, "norm"),  # a replica
        ("all", 7, "row"),
    ],
)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_value_on_one_rank_reaches_all(layout, rank, name, value):
    ranks = run_on_ranks(
        size_of(LAYOUTS[layout]), spoil_on_rank, LAYOUTS[layout], rank, name, value
    )
    for norm, untouched in ranks:
        assert str(norm) == str(abs(value))
        assert untouched


def large_on_rank(layout):
    """Gradients whose squares fp32 cannot hold."""
    masters, groups, copies = masters_on_rank(layout, torch.float32)
    for parameter in masters.values():
        local(parameter.grad).mul_(2.0**100)
    return clip_gradients(masters.values(), 0.0, groups, copies=copies, loss_scale=2.0**100)


@pytest.mark.parametrize("layout", ["one rank", "data 2", "data 2 x tensor 2", "pipeline 2"])
def test_no_layout_sees_an_overflow_that_is_none(layout):
    full = full_gradients(torch.float32)
    truth = torch.cat([g.double().reshape(-1) for g in full.values()]).norm().item()
    for norm in run_on_ranks(size_of(LAYOUTS[layout]), large_on_rank, LAYOUTS[layout]):
        assert math.isclose(norm, truth, rel_tol=1e-12)


def unequal_on_rank():
    """Rank 0 holds a gradient, rank 1 a parameter without one, rank 2 nothing."""
    groups = groups_of(build_mesh("cpu", tensor=1, pipeline=3, data=1))
    parameters = parameters_with([torch.tensor([3.0, 4.0])])
    if groups.pp.rank == 1:
        parameters[0].grad = None
    return clip_gradients(parameters if groups.pp.rank < 2 else [], 1.0, groups)


def test_ranks_without_gradients_or_parameters_join():
    assert run_on_ranks(3, unequal_on_rank) == [5.0, 5.0, 5.0]
