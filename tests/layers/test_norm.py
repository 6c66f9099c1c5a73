"""Norms by their formulas, gradients included."""

import pytest
import torch

from lib.layers.norm import LayerNorm, RMSNorm, build_norm
from lib.parallel.groups import Group
from tests.reference import FLOAT64


def filled(kind, size, epsilon):
    norm = build_norm(kind, size, epsilon, Group()).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def by_formula(x, norm, epsilon):
    if isinstance(norm, RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + epsilon).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize(("kind", "type_"), [("layernorm", LayerNorm), ("rmsnorm", RMSNorm)])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_forward_and_gradients(kind, type_, epsilon):
    norm = filled(kind, 24, epsilon)
    assert isinstance(norm, type_)
    x = torch.randn(5, 2, 24, dtype=torch.float64).requires_grad_()
    upstream = torch.randn_like(x)
    leaves = [x, *norm.parameters()]
    expected = torch.autograd.grad((by_formula(x, norm, epsilon) * upstream).sum(), leaves)
    found = torch.autograd.grad((norm(x) * upstream).sum(), leaves)
    torch.testing.assert_close(norm(x), by_formula(x, norm, epsilon), **FLOAT64)
    for gradient, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, truth, **FLOAT64)


def test_parameters():
    assert [name for name, _ in build_norm("layernorm", 8, 1e-5, Group()).named_parameters()] == [
        "weight",
        "bias",
    ]
    assert [name for name, _ in build_norm("rmsnorm", 8, 1e-5, Group()).named_parameters()] == [
        "weight"
    ]


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_each_head_is_normalised_by_itself(kind):
    norm = filled(kind, 6, 1e-5)
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    assert torch.equal(norm(x)[1, 1, 2], norm(x[1, 1, 2]))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_bf16_is_normalised_in_higher_precision(kind):
    norm = filled(kind, 64, 1e-5)
    x = 100 + torch.randn(8, 64)  # a mean that bf16 sums would drown in
    truth = by_formula(x.bfloat16().double(), norm.double(), 1e-5).detach()
    found = norm.bfloat16()(x.bfloat16()).double()
    eps = torch.finfo(torch.bfloat16).eps
    # Weight, bias and result are rounded once each.
    torch.testing.assert_close(found, truth, rtol=3 * eps, atol=3 * eps)
