"""Core attention: every backend against the plain formula; causality; grouped heads; dropout."""

import pytest
import torch

from lib.layers.attention import BACKENDS, attention_backend
from tests.reference import FLOAT64, plain_attention

_HEADS = [(4, 4), (4, 2), (6, 1)]


def drawn(heads, groups, length=9, dtype=torch.float64):
    q = torch.randn(length, 2, heads, 8, dtype=dtype)
    k = torch.randn(length, 2, groups, 8, dtype=dtype)
    v = torch.randn(length, 2, groups, 8, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)]


def by_formula(q, k, v):
    shared = q.shape[2] // k.shape[2]
    heads = [
        plain_attention(
            q[:, :, head].transpose(0, 1),
            k[:, :, head // shared].transpose(0, 1),
            v[:, :, head // shared].transpose(0, 1),
        )
        for head in range(q.shape[2])
    ]
    return torch.cat(heads, dim=-1).transpose(0, 1)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize(("heads", "groups"), _HEADS)
@pytest.mark.parametrize("length", [1, 9])
def test_forward_and_gradients(backend, heads, groups, length):
    inputs = drawn(heads, groups, length)
    upstream = torch.randn(length, 2, heads * 8, dtype=torch.float64)
    output = attention_backend(backend)(*inputs, 0.0)
    expected = by_formula(*inputs)
    torch.testing.assert_close(output, expected, **FLOAT64)
    found = torch.autograd.grad((output * upstream).sum(), inputs)
    truth = torch.autograd.grad((expected * upstream).sum(), inputs)
    for gradient, true_gradient in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient, true_gradient, **FLOAT64)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(backend, dtype):
    inputs = [x.detach().to(dtype) for x in drawn(4, 2, length=32)]
    output = attention_backend(backend)(*inputs, 0.0)
    assert output.dtype == dtype
    expected = by_formula(*(x.double() for x in inputs))
    # Scores, weights and the result are rounded; their sizes are about 3.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_later_token_changes_nothing_before_it(backend):
    q, k, v = (x.detach() for x in drawn(4, 2))
    base = attention_backend(backend)(q, k, v, 0.0)
    for place in range(9):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[place] += 1.0
        output = attention_backend(backend)(*changed, 0.0)
        torch.testing.assert_close(output[:place], base[:place], rtol=0, atol=0)
        assert not torch.equal(output[place], base[place])


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_dropout_keeps_the_mean_and_can_be_replayed(backend):
    q, k, v = (x.detach().float() for x in drawn(2, 2, length=4))
    core = attention_backend(backend)
    torch.manual_seed(3)
    first = core(q, k, v, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, core(q, k, v, 0.5))
    assert not torch.equal(first, core(q, k, v, 0.5))
    wide = [x.repeat(1, 3000, 1, 1) for x in (q, k, v)]  # 6000 sequences, two different ones
    mean = core(*wide, 0.5).unflatten(1, (3000, 2)).mean(1)
    # A mean of 3000 values of size about 2.
    torch.testing.assert_close(mean, core(q, k, v, 0.0), rtol=0, atol=5 * 2 / 3000**0.5)


def test_auto_is_torchs_choice_and_others_are_refused():
    assert attention_backend("auto") is BACKENDS["sdpa"]
    with pytest.raises(KeyError):
        attention_backend("flash4")
