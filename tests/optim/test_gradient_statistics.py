"""Statistics of gradients against the plain formulas on the whole gradient, in every layout."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.optim.gradient_statistics import gradient_statistics
from lib.parallel.groups import ParallelGroups
from lib.parallel.masters import create_masters, fill_shard, gradient_of
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import Cut, local
from tests.distributed import run_on_ranks
from tests.optim.clipped import clip_gradients

# Full shape, and the dimension that the tensor-parallel group cuts.
_KINDS = {
    "embedding.weight": ((12, 3), 0),
    "layers.2.column.weight": ((8, 6), 0),
    "layers.2.norm.bias": ((5,), None),
    "layers.10.row.weight": ((6, 8), 1),
    "layers.10.scale": ((1,), None),
}
_STAGES = [
    {"embedding.weight", "layers.2.column.weight", "layers.2.norm.bias"},
    {"embedding.weight", "layers.10.row.weight", "layers.10.scale"},  # the embedding is tied
]


def full_gradients():
    """With zeros, negative largest values and elements that are not finite."""
    generator = torch.Generator().manual_seed(6)
    found = {}
    for name, (shape, _) in _KINDS.items():
        gradient = torch.randn(shape, generator=generator)
        gradient[torch.rand(shape, generator=generator) < 0.25] = 0.0
        found[name] = gradient
    found["layers.2.column.weight"][7, 5] = -50.0
    found["layers.10.row.weight"][0, 0] = math.inf
    found["layers.10.row.weight"][5, 7] = -math.inf
    found["embedding.weight"][11, 2] = math.nan
    return found


def by_formulas(gradient):
    """The figures of one whole gradient, element by element in Python's float64."""
    values = gradient.reshape(-1).tolist()
    finite = [value for value in values if math.isfinite(value)]
    return {
        "norm": math.sqrt(math.fsum(value * value for value in finite)),
        "max_abs": max(map(abs, finite)),
        "mean": math.fsum(finite) / len(finite),
        "zeros": values.count(0.0) / len(values),
        "not_finite": len(values) - len(finite),
    }


def assert_rows(rows, gradients):
    names = ["embedding.weight", "layers.2.column.weight", "layers.2.norm.bias"]
    names += ["layers.10.row.weight", "layers.10.scale"]
    assert [row["name"] for row in rows] == [name for name in names if name in gradients]
    for row in rows:
        truth = by_formulas(gradients[row["name"]])
        assert row.keys() == {"name", *truth}
        for column, value in truth.items():
            assert math.isclose(row[column], value, rel_tol=1e-12, abs_tol=1e-15)
        assert isinstance(row["not_finite"], int)


def plain_parameters(gradients):
    parameters = {}
    for name, gradient in gradients.items():
        parameters[name] = nn.Parameter(torch.zeros_like(gradient))
        parameters[name].grad = gradient.clone()
    return parameters


@pytest.mark.parametrize("exponent", [0, 16, -3])
def test_plain_tensors_at_any_loss_scale(exponent):
    full = full_gradients()
    scale = 2.0**exponent
    scaled = plain_parameters({name: gradient * scale for name, gradient in full.items()})
    assert_rows(gradient_statistics(scaled, ParallelGroups(), loss_scale=scale), full)


def test_gradients_are_not_changed():
    full = full_gradients()
    parameters = plain_parameters(full)
    gradient_statistics(parameters, ParallelGroups(), loss_scale=4.0)
    for name, gradient in full.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=0, atol=0, equal_nan=True)


def test_no_gradient_no_row():
    parameters = {"with": nn.Parameter(torch.ones(2)), "without": nn.Parameter(torch.ones(2))}
    parameters["with"].grad = torch.tensor([3.0, 4.0])
    (row,) = gradient_statistics(parameters, ParallelGroups())
    assert row["name"] == "with"
    assert row["norm"] == 5.0
    assert gradient_statistics({}, ParallelGroups()) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_finite_at_all(bad):
    (row,) = gradient_statistics(plain_parameters({"x": torch.full((3,), bad)}), ParallelGroups())
    assert row == {
        "name": "x",
        "norm": 0.0,
        "max_abs": 0.0,
        "mean": 0.0,
        "zeros": 0.0,
        "not_finite": 3,
    }


def test_the_norms_make_up_the_norm_that_clipping_sees():
    finite = {name: g.nan_to_num(0.0, 1.0, 2.0) for name, g in full_gradients().items()}
    parameters = plain_parameters(finite)
    rows = gradient_statistics(parameters, ParallelGroups())
    total = math.sqrt(math.fsum(row["norm"] ** 2 for row in rows))
    norm = clip_gradients(parameters.values(), 0.0, ParallelGroups())
    assert math.isclose(total, norm, rel_tol=1e-12)


def sharded_on_rank(layout):
    """This rank's shards of the gradients, as the parallel engine stores them."""
    mesh = build_mesh("cpu", **layout)
    stage = mesh["pp"].get_local_rank()
    names = _STAGES[stage] if layout["pipeline"] == 2 else _KINDS.keys()
    cuts = {
        name: Cut(shape, dim, groups_of(mesh).tp)
        for name, (shape, dim) in _KINDS.items()
        if name in names
    }
    parameters, gradients = (create_masters(cuts, mesh, torch.float32) for _ in range(2))
    for name, parameter in parameters.items():
        fill_shard(gradients[name], cuts[name].part_of(full_gradients()[name]), mesh)
        parameter.grad = gradient_of(parameter, local(gradients[name].detach()).mul_(8.0))
    if stage == 1:
        del parameters["embedding.weight"]  # a tied copy
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
        rows = gradient_statistics(parameters, groups_of(mesh), loss_scale=8.0)
    return rows, reductions.call_count


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 1, "pipeline": 1, "data": 3},
        {"tensor": 2, "pipeline": 1, "data": 1},
        {"tensor": 1, "pipeline": 2, "data": 1},
        {"tensor": 2, "pipeline": 1, "data": 2},
        {"tensor": 1, "pipeline": 1, "data": 4, "data_shard": 2},
        pytest.param(
            {"tensor": 2, "pipeline": 2, "data": 2, "data_shard": 1}, marks=pytest.mark.layouts
        ),
    ],
    ids=str,
)
def test_every_layout_gives_the_same_rows_on_rank_0(layout):
    size = layout["tensor"] * layout["pipeline"] * layout["data"]
    (rows, reductions), *others = run_on_ranks(size, sharded_on_rank, layout)
    assert_rows(rows, full_gradients())
    assert reductions <= 4  # two for each axis of a stage, however many parameters
    assert [found for found, _ in others] == [[]] * (size - 1)
