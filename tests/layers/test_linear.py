"""Column- and row-parallel linear layers against the whole matrix, forward and both gradients."""

import pytest
import torch
import torch.distributed as dist

from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.parallel.groups import Group
from lib.parallel.storage import cut_of
from tests.distributed import run_on_ranks
from tests.reference import FLOAT64

_PARTS = {"q": 16, "k": 8}
_SHAPE = (3, 2)  # S, B


def whole_group():
    size = dist.get_world_size()
    return Group(dist.get_rank(), size, dist.group.WORLD if size > 1 else None)


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(parameter, full):
    cut = cut_of(parameter)
    assert cut.full_shape == tuple(full.shape)
    parameter.data = cut.part_of(full).clone()


def column_on_rank(bias):
    group = whole_group()
    layer = ColumnParallelLinear(12, _PARTS, group, bias=bias)
    for seed, (name, size) in enumerate(_PARTS.items()):
        part = layer.get_submodule(name)
        fill(part.weight, drawn(10 + seed, size, 12))
        if bias:
            fill(part.bias, drawn(20 + seed, size))
    x = drawn(1, *_SHAPE, 12).requires_grad_()
    outputs = layer(x)
    weighted = [
        (output * cut_columns(drawn(30 + seed, *_SHAPE, size), group)).sum()
        for seed, (output, size) in enumerate(zip(outputs, _PARTS.values(), strict=True))
    ]
    sum(weighted).backward()
    gradients = {name: value.grad for name, value in layer.named_parameters()}
    return [output.detach() for output in outputs], x.grad, gradients


def cut_columns(full, group):
    return full.chunk(group.size, dim=-1)[group.rank]


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_is_the_whole_map(tensor, bias):
    ranks = run_on_ranks(tensor, column_on_rank, bias)
    x = drawn(1, *_SHAPE, 12).requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    truth = {}
    for seed, (name, size) in enumerate(_PARTS.items()):
        weight = drawn(10 + seed, size, 12).requires_grad_()
        offset = drawn(20 + seed, size).requires_grad_()
        y = x @ weight.T + (offset if bias else 0.0)
        gathered = torch.cat([outputs[seed] for outputs, _, _ in ranks], dim=-1)
        torch.testing.assert_close(gathered, y.detach(), **FLOAT64)
        loss = loss + (y * drawn(30 + seed, *_SHAPE, size)).sum()
        truth |= {f"{name}.weight": weight} | ({f"{name}.bias": offset} if bias else {})
    loss.backward()
    for _, input_gradient, _ in ranks:
        torch.testing.assert_close(input_gradient, x.grad, **FLOAT64)
    assert set(ranks[0][2]) == set(truth)
    for name, parameter in truth.items():
        gathered = torch.cat([gradients[name] for _, _, gradients in ranks])
        torch.testing.assert_close(gathered, parameter.grad, **FLOAT64)


def row_on_rank(bias):
    group = whole_group()
    layer = RowParallelLinear(12, 6, group, bias=bias)
    fill(layer.weight, drawn(10, 6, 12))
    if bias:
        fill(layer.bias, drawn(20, 6))
    x = cut_columns(drawn(1, *_SHAPE, 12), group).clone().requires_grad_()
    output = layer(x)
    (output * drawn(30, *_SHAPE, 6)).sum().backward()
    gradients = {name: value.grad for name, value in layer.named_parameters()}
    return output.detach(), x.grad, gradients


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_is_the_whole_map(tensor, bias):
    ranks = run_on_ranks(tensor, row_on_rank, bias)
    x = drawn(1, *_SHAPE, 12).requires_grad_()
    weight, offset = drawn(10, 6, 12).requires_grad_(), drawn(20, 6).requires_grad_()
    y = x @ weight.T + (offset if bias else 0.0)
    (y * drawn(30, *_SHAPE, 6)).sum().backward()
    for output, _, gradients in ranks:
        torch.testing.assert_close(output, y.detach(), **FLOAT64)
        if bias:  # whole on every rank, and added once
            torch.testing.assert_close(gradients["bias"], offset.grad, **FLOAT64)
        assert set(gradients) == ({"weight", "bias"} if bias else {"weight"})
    torch.testing.assert_close(torch.cat([r[1] for r in ranks], dim=-1), x.grad, **FLOAT64)
    gathered = torch.cat([r[2]["weight"] for r in ranks], dim=1)
    torch.testing.assert_close(gathered, weight.grad, **FLOAT64)
