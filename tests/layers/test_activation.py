"""Activations by their formulas."""

import math

import torch

from lib.layers.activation import gelu, swiglu


def test_gelu_is_the_tanh_form():
    for value in (-6.0, -1.3, -0.1, 0.0, 0.7, 2.0, 9.0):
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
        expected = 0.5 * value * (1 + math.tanh(inner))
        found = gelu(torch.tensor(value, dtype=torch.float64)).item()
        assert math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-15)


def test_swiglu_gates_the_second_half_by_the_first():
    gates, ups = [-3.0, 0.0, 0.5, 4.0], [2.0, 5.0, -1.0, 0.25]
    found = swiglu(torch.tensor([gates + ups], dtype=torch.float64), fused=False)
    assert found.shape == (1, 4)
    for value, gate, up in zip(found[0].tolist(), gates, ups, strict=True):
        assert math.isclose(value, gate / (1 + math.exp(-gate)) * up, rel_tol=1e-12)
