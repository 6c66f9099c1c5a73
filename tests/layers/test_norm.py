"""Norms by their formulas, gradients included, on one rank and on several."""

import pytest
import torch

from lib.layers.norm import HeadNorm, LayerNorm, RMSNorm, build_norm
from lib.parallel.groups import ParallelGroups
from tests.distributed import run_on_ranks
from tests.layers.on_ranks import (
    assert_close,
    cut_sequence,
    drawn,
    fill,
    gradients,
    join_activations,
    join_parameters,
    tensor_groups,
)
from tests.reference import FLOAT64


def filled(kind, size, epsilon):
    norm = build_norm(kind, size, epsilon, ParallelGroups()).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def by_formula(x, norm, epsilon):
    if not isinstance(norm, LayerNorm):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + epsilon).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize(("kind", "type_"), [("layernorm", LayerNorm), ("rmsnorm", RMSNorm)])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
@pytest.mark.parametrize("adds", [False, True])
def test_forward_and_gradients(kind, type_, adds, epsilon):
    norm = filled(kind, 24, epsilon)
    assert isinstance(norm, type_)
    x = torch.randn(5, 2, 24, dtype=torch.float64).requires_grad_()
    branch = torch.randn_like(x, requires_grad=True) if adds else None
    total = x if branch is None else x + branch
    upstreams = torch.randn(2, *x.shape, dtype=torch.float64).unbind()
    leaves = [x, *norm.parameters()] + ([] if branch is None else [branch])
    outputs, truths = norm(x, branch), (total, by_formula(total, norm, epsilon))
    expected = torch.autograd.grad(truths, leaves, upstreams)
    found = torch.autograd.grad(outputs, leaves, upstreams)
    for value, truth in zip((*outputs, *found), (*truths, *expected), strict=True):
        torch.testing.assert_close(value, truth, **FLOAT64)


def test_parameters():
    expected = {"layernorm": ["weight", "bias"], "rmsnorm": ["weight"]}
    for kind, names in expected.items():
        norm = build_norm(kind, 8, 1e-5, ParallelGroups())
        assert [name for name, _ in norm.named_parameters()] == names


def test_each_head_is_normalised_by_itself():
    norm = HeadNorm(6, 1e-5, ParallelGroups()).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(norm(x), by_formula(x, norm, 1e-5), **FLOAT64)
    assert torch.equal(norm(x)[1, 1, 2], norm(x[1, 1, 2]))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_bf16_is_normalised_in_higher_precision(kind):
    norm = filled(kind, 64, 1e-5)
    x = 100 + torch.randn(8, 64)  # a mean that bf16 sums would drown in
    truth = by_formula(x.bfloat16().double(), norm.double(), 1e-5).detach()
    found = norm.bfloat16()(x.bfloat16())[1].double()
    eps = torch.finfo(torch.bfloat16).eps
    # Weight, bias and result are rounded once each.
    torch.testing.assert_close(found, truth, rtol=3 * eps, atol=3 * eps)


def values_of(kind):
    return {"weight": drawn(1, 6)} | ({"bias": drawn(2, 6)} if kind == "layernorm" else {})


def norm_on_rank(kind, sequence):
    groups = tensor_groups(sequence=sequence)
    norm = build_norm(kind, 6, 1e-5, groups)
    fill(norm, values_of(kind))
    x = cut_sequence(drawn(3, 12, 2, 6), groups).clone().requires_grad_()
    _, output = norm(x)
    (output * cut_sequence(drawn(4, 12, 2, 6), groups)).sum().backward()
    return output.detach(), x.grad, gradients(norm)


def heads_on_rank(sequence):
    """Every rank has heads of its own, whole sequences of them."""
    groups = tensor_groups(sequence=sequence)
    norm = HeadNorm(6, 1e-5, groups)
    fill(norm, values_of("rmsnorm"))
    x = drawn(3, 12, 2, 6).chunk(groups.tp.size)[groups.tp.rank].clone().requires_grad_()
    output = norm(x)
    (output * drawn(4, 12, 2, 6).chunk(groups.tp.size)[groups.tp.rank]).sum().backward()
    return output.detach(), x.grad, gradients(norm)


def compare(ranks, kind, *, cut):
    norm = build_norm(kind, 6, 1e-5, ParallelGroups())
    fill(norm, values_of(kind))
    x = drawn(3, 12, 2, 6).requires_grad_()
    output = by_formula(x, norm, 1e-5)
    (output * drawn(4, 12, 2, 6)).sum().backward()
    assert_close(join_activations([rank[0] for rank in ranks], sequence=cut), output.detach())
    assert_close(join_activations([rank[1] for rank in ranks], sequence=cut), x.grad)
    for name, parameter in norm.named_parameters():
        gradient = join_parameters([rank[2][name] for rank in ranks], None)
        assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("tensor", [2, 3, 4])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_gradients_are_whole_on_every_rank(kind, sequence, tensor):
    """Fault: under sequence parallelism the ranks' gradients of weights were left partial."""
    compare(run_on_ranks(tensor, norm_on_rank, kind, sequence), kind, cut=sequence)


@pytest.mark.parametrize("tensor", [2, 3, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_norms_of_heads_sum_over_the_ranks_in_any_case(sequence, tensor):
    compare(run_on_ranks(tensor, heads_on_rank, sequence), "rmsnorm", cut=True)
