"""Rotary positions: complex multiplication, relative distance, its limits; heads cut and turned."""

import pytest
import torch

from lib.layers.rotary import HeadShape, Rotary, rotary_table, rotate, split_heads
from tests.reference import FLOAT64, plain_rotary

_CPU = torch.device("cpu")
_FP32_EPS = torch.finfo(torch.float32).eps


def turned(x_SBND, theta=10_000.0):
    table = rotary_table(x_SBND.shape[0], x_SBND.shape[-1], theta, _CPU)
    return rotate(x_SBND, table, fused=False)


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
    assert table.shape == (2, 2048, 4)
    assert table.dtype == torch.float32
    frequencies = theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.outer(torch.arange(2048, dtype=torch.float64), frequencies)
    # Frequencies and angles are rounded to fp32 (a few units in the last place of the exponent).
    error = 2048 * 4 * _FP32_EPS
    torch.testing.assert_close(table[0].double(), angles.cos(), rtol=0, atol=error)
    torch.testing.assert_close(table[1].double(), angles.sin(), rtol=0, atol=error)


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


def test_sequences_may_have_positions_of_their_own():
    rotary = Rotary(8, 500.0)
    positions_SB = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 2], [2, 3]])
    x = torch.randn(5, 2, 4, 8, dtype=torch.float64)
    found = rotate(x, rotary.table(5, _CPU, positions_SB), fused=False)
    for row in range(2):
        expected = plain_rotary(x[:, row].transpose(0, 1), 500.0, positions_SB[:, row])
        torch.testing.assert_close(found[:, row], expected.transpose(0, 1), **FLOAT64)
    counted = rotary.table(5, _CPU, torch.arange(5)[:, None].expand(5, 2))
    assert torch.equal(counted, rotary.table(5, _CPU).unsqueeze(2).expand(2, 5, 2, 4))


@pytest.mark.parametrize("kind", ["none", "shared", "by sequence"])
def test_a_projection_is_cut_into_its_heads(kind):
    """Column by column: head n of the queries lies before all keys, keys before values."""
    shape, rotary = HeadShape(num_heads=4, num_groups=2, head_dim=6), Rotary(6, 500.0)
    positions_SB = torch.tensor([[0, 2], [1, 0], [2, 1]])
    table = {
        "none": None,
        "shared": rotary.table(3, _CPU),
        "by sequence": rotary.table(3, _CPU, positions_SB),
    }[kind]
    qkv = torch.randn(3, 2, 8 * 6, dtype=torch.float64)
    before = qkv.clone()
    q, k, v = split_heads(qkv, table, shape, fused=False)
    assert q.shape == (3, 2, 4, 6)
    assert k.shape == v.shape == (3, 2, 2, 6)
    for row in range(2):
        positions = positions_SB[:, row] if kind == "by sequence" else None
        for number, head in enumerate((*q[:, row].unbind(1), *k[:, row].unbind(1))):
            expected = before[:, row, number * 6 : number * 6 + 6]
            if table is not None:
                expected = plain_rotary(expected.unsqueeze(0), 500.0, positions)[0]
            torch.testing.assert_close(head, expected, **FLOAT64)
    assert torch.equal(v.flatten(-2), before[..., 6 * 6 :])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("with_table", [False, True])
def test_the_gradient_of_a_projection(with_table):
    shape = HeadShape(num_heads=3, num_groups=1, head_dim=4)
    table = Rotary(4, 100.0).table(3, _CPU) if with_table else None
    qkv = torch.randn(3, 2, 5 * 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: split_heads(x, table, shape, fused=False), qkv)


def test_the_table_is_kept_and_serves_shorter_sequences(monkeypatch):
    made = []

    def counted(length, *args):
        made.append(length)
        return rotary_table(length, *args)

    monkeypatch.setattr("lib.layers.rotary.rotary_table", counted)
    rotary = Rotary(8, 1e4)
    for length in (5, 5, 3, 6, 5, 6):
        assert torch.equal(rotary.table(length, _CPU), rotary_table(length, 8, 1e4, _CPU))
    assert made == [5, 6]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_table_made_without_gradients_serves_training(context):
    rotary = Rotary(8, 1e4)
    with context():
        rotary.table(4, _CPU)
    table = rotary.table(4, _CPU)
    x = torch.randn(4, 1, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: rotate(y, table, fused=False), x)
