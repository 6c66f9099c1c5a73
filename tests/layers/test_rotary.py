"""Rotary positions: complex multiplication, relative distance, and its limits."""

import pytest
import torch

from lib.layers.rotary import Rotary, apply_rotary, rotary_table
from tests.reference import FLOAT64, plain_rotary

_CPU = torch.device("cpu")
_FP32_EPS = torch.finfo(torch.float32).eps


def turned(x_SBND, theta=10_000.0):
    return apply_rotary(x_SBND, rotary_table(x_SBND.shape[0], x_SBND.shape[-1], theta, _CPU))


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_equals_complex_multiplication(head_dim, theta):
    x = torch.randn(33, 2, 3, head_dim, dtype=torch.float64)
    for head in range(3):
        expected = plain_rotary(x[:, :, head].transpose(0, 1), theta).transpose(0, 1)
        torch.testing.assert_close(turned(x, theta)[:, :, head], expected, **FLOAT64)


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
def test_angles_are_position_over_wavelength(theta):
    table = rotary_table(2048, 8, theta, _CPU)
    assert table.shape == (2, 2048, 1, 1, 8)
    assert table.dtype == torch.float32
    frequencies = theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.outer(torch.arange(2048, dtype=torch.float64), frequencies)
    # Frequencies and angles are rounded to fp32 (a few units in the last place of the exponent).
    error = 2048 * 4 * _FP32_EPS
    for half in (slice(0, 4), slice(4, 8)):
        torch.testing.assert_close(
            table[0, :, 0, 0, half].double(), angles.cos(), rtol=0, atol=error
        )
        torch.testing.assert_close(
            table[1, :, 0, 0, half].double(), angles.sin(), rtol=0, atol=error
        )


def test_products_depend_on_the_distance_alone():
    query, key = torch.randn(2, 16, dtype=torch.float64)
    length = 64
    queries = turned(query.expand(length, 1, 1, 16))[:, 0, 0]
    keys = turned(key.expand(length, 1, 1, 16))[:, 0, 0]
    products = queries @ keys.T
    for distance in (-20, -1, 0, 1, 7, 40):
        diagonal = products.diagonal(distance)
        # Angles are fp32: their error grows with the position.
        error = length * 4 * _FP32_EPS * query.norm().item() * key.norm().item()
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=error)
    assert (products.diagonal(1)[0] - products.diagonal(7)[0]).abs() > 1e-3


def test_lengths_are_kept_and_the_first_position_is_not_turned():
    x = torch.randn(10, 1, 2, 8, dtype=torch.float64)
    y = turned(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=4 * _FP32_EPS, atol=0)
    assert torch.equal(y[0], x[0])
    assert not torch.equal(y[1], x[1])


def test_a_longer_table_begins_like_a_shorter_one():
    assert torch.equal(rotary_table(100, 8, 1e4, _CPU)[:, :10], rotary_table(10, 8, 1e4, _CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype):
    x = torch.randn(5, 1, 2, 8)
    y = turned(x.to(dtype))
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    # Input, cosine, sine, two products and a sum, of vectors of size about 4.
    torch.testing.assert_close(y.double(), turned(x.double()), rtol=0, atol=16 * eps)


def test_the_object_turns_queries_and_keys_alike():
    rotary = Rotary(8, 500.0)
    q, k = torch.randn(9, 2, 4, 8, dtype=torch.float64), torch.randn(9, 2, 1, 8).double()
    turned_q, turned_k = rotary(q, k)
    for x, found in ((q, turned_q), (k, turned_k)):
        for head in range(x.shape[2]):
            expected = plain_rotary(x[:, :, head].transpose(0, 1), 500.0).transpose(0, 1)
            torch.testing.assert_close(found[:, :, head], expected, **FLOAT64)


def test_sequences_may_have_positions_of_their_own():
    rotary = Rotary(8, 500.0)
    positions_SB = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 2], [2, 3]])
    q, k = torch.randn(5, 2, 4, 8, dtype=torch.float64), torch.randn(5, 2, 1, 8).double()
    turned_q, turned_k = rotary(q, k, positions_SB)
    for x, found in ((q, turned_q), (k, turned_k)):
        for row in range(2):
            expected = plain_rotary(x[:, row].transpose(0, 1), 500.0, positions_SB[:, row])
            torch.testing.assert_close(found[:, row], expected.transpose(0, 1), **FLOAT64)
    plain = rotary(q, k, torch.arange(5)[:, None].expand(5, 2))
    assert all(map(torch.equal, plain, rotary(q, k)))


def test_the_table_is_kept_and_serves_shorter_sequences(monkeypatch):
    made = []

    def counted(length, *args):
        made.append(length)
        return rotary_table(length, *args)

    monkeypatch.setattr("lib.layers.rotary.rotary_table", counted)
    rotary = Rotary(8, 1e4)
    for length, dtype in ((5, torch.float32), (5, torch.float32), (3, torch.float32)):
        x = torch.randn(length, 1, 2, 8, dtype=dtype)
        assert torch.equal(rotary(x, x)[0], turned(x))
    assert made == [5]
    for length, dtype in ((6, torch.float32), (5, torch.float64), (6, torch.float64)):
        x = torch.randn(length, 1, 2, 8, dtype=dtype)
        assert torch.equal(rotary(x, x)[1], turned(x))
    assert made == [5, 6, 5, 6]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_table_made_without_gradients_serves_training(context):
    rotary = Rotary(8, 1e4)
    x = torch.randn(4, 1, 2, 8, dtype=torch.float64)
    with context():
        rotary(x, x)
    x.requires_grad_()
    assert torch.autograd.gradcheck(rotary, (x, x.detach()))
