"""Torch's form of the softmax of attention scores, and when it is taken."""

import math

import pytest
import torch

from lib.layers.softmax import scaled_masked_softmax
from tests.reference import FLOAT64, plain_attention


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("fused", [False, True])
def test_attention_row_by_row(fused):
    """Float64, which no kernel takes: torch's form even if kernels are asked for."""
    q, k, v = (drawn(2, 1, 7, 4, seed=seed).requires_grad_() for seed in range(3))
    weights = scaled_masked_softmax(q @ k.transpose(-1, -2), 0.5, None, fused=fused)
    context = weights @ v
    grads = torch.autograd.grad(context.square().sum(), (q, k, v))
    expected = plain_attention(*(x.squeeze(1) for x in (q, k, v)))
    truth = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(context.squeeze(1), expected, **FLOAT64)
    for mine, true in zip(grads, truth, strict=True):
        torch.testing.assert_close(mine, true, **FLOAT64)


@pytest.mark.parametrize("mask", [(2, 1, 3, 5), (2, 1, 1, 5), (1, 1, 3, 5)])
def test_hidden_keys(mask):
    scores = drawn(2, 2, 3, 5).requires_grad_()
    hidden = drawn(*mask, seed=2) < 0.0
    weights = scaled_masked_softmax(scores, 2.0, hidden, fused=False)
    slope = drawn(2, 2, 3, 5, seed=3)
    (grad,) = torch.autograd.grad(weights, scores, slope)
    for b, n, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)):
        seen = [j for j in range(5) if j <= i + 2 and not hidden.expand_as(scores)[b, n, i, j]]
        part = scores[b, n, i, seen].detach().requires_grad_()
        expected, expected_grad = torch.zeros(2, 5, dtype=torch.float64)
        share = (2.0 * part).softmax(0)
        expected[seen] = share.detach()
        (expected_grad[seen],) = torch.autograd.grad(share, part, slope[b, n, i, seen])
        torch.testing.assert_close(weights[b, n, i].detach(), expected, **FLOAT64)
        torch.testing.assert_close(grad[b, n, i], expected_grad, **FLOAT64)


def test_a_query_that_sees_nothing_has_zeros():
    scores = drawn(1, 1, 4, 2).requires_grad_()
    hidden = torch.tensor([[[[False, False], [False, False], [True, False], [True, True]]]])
    weights = scaled_masked_softmax(scores, 1.0, hidden, fused=False)
    (grad,) = torch.autograd.grad(weights.square().sum(), scores)
    assert weights[0, 0, :, 0].eq(0).all()
    assert weights[0, 0, :, 1].eq(0).all()  # keys begin two queries later
    assert grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computed_in_fp32_and_given_in_the_dtype_of_the_scores(dtype):
    scores = (1e3 * drawn(1, 2, 5, 5)).to(dtype)
    weights = scaled_masked_softmax(scores, 1.5, None, fused=False)
    assert weights.dtype == dtype
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    exact = (1.5 * scores.double()).masked_fill(later, -math.inf).softmax(-1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(weights.double(), exact, rtol=eps, atol=1e-6)
