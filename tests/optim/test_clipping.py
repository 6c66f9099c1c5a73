"""Gradient clipping against torch's, and over shards."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lib.optim.clipping import clip_gradients
from lib.parallel.groups import ParallelGroups
from lib.parallel.mesh import build_mesh, groups_of
from tests.distributed import run_on_ranks


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
def test_a_gradient_that_is_no_number_shows_in_the_norm(bad):
    parameters = parameters_with([torch.tensor([1.0, bad]), torch.ones(2)])
    assert not math.isfinite(clip_gradients(parameters, 1.0, ParallelGroups()))


_FULL = {"matrix": (6, 8), "row": (8, 6), "norm": (5,), "tiny": (1,)}


def full_gradients():
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in _FULL.items()
    }


def clip_on_rank(tensor, max_norm):
    """A matrix cut by both axes, one cut along dimension 1, and vectors cut by dp alone."""
    data = dist.get_world_size() // tensor
    mesh = build_mesh("cpu", tensor=tensor, pipeline=1, data=data)
    two = mesh["dp", "tp"]
    placements = {
        "matrix": [Shard(1), Shard(0)],
        "row": [Shard(0), Shard(1)],
        "norm": [Shard(0), Replicate()],
        "tiny": [Shard(0), Replicate()],  # all but one rank hold nothing of it
    }
    parameters = {}
    for name, full in full_gradients().items():
        shards = DTensor.from_local(full.clone(), two, [Replicate()] * 2)
        shards = shards.redistribute(two, placements[name])
        parameters[name] = nn.Parameter(torch.zeros_like(shards))
        parameters[name].grad = copy.copy(shards)
    norm = clip_gradients(parameters.values(), max_norm, groups_of(mesh))
    return norm, {name: value.grad.full_tensor() for name, value in parameters.items()}


@pytest.mark.parametrize(("size", "tensor"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (4, 4)])
def test_every_element_counts_once_over_shards(size, tensor):
    full = full_gradients()
    truth = torch.cat([g.reshape(-1) for g in full.values()]).norm().item()
    for norm, clipped in run_on_ranks(size, clip_on_rank, tensor, 2.0):
        assert math.isclose(norm, truth, rel_tol=1e-12)
        for name, value in clipped.items():
            torch.testing.assert_close(value, full[name] * 2.0 / (truth + 1e-6), rtol=1e-12, atol=0)
