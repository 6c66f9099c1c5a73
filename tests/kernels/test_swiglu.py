"""The fused SwiGLU against torch's in float64."""

import pytest
import torch

import kernels.swiglu
from lib.layers.activation import swiglu as dispatched
from tests.kernels.closeness import assert_close, assert_same_as_exact, drawn


def fused(gate_up):
    return kernels.swiglu.swiglu(gate_up)


def plain(gate_up):
    return dispatched(gate_up, fused=False)


@pytest.mark.parametrize(
    "shape", [(4, 2), (3, 2, 14), (7, 2 * 1023), (2, 2 * 1024), (2, 3, 2 * 2500)], ids=str
)
def test_output_and_gradient(shape, dtype, device):
    gate_up = drawn(shape, dtype, device, seed=1)
    upstream = drawn((*shape[:-1], shape[-1] // 2), dtype, device, seed=2)
    assert_same_as_exact(fused, plain, [gate_up], [upstream], dtype)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter's exp
def test_gates_that_are_wide_open_or_shut(dtype, device):
    gate = torch.tensor([-6e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0])
    gate_up = torch.cat((gate, torch.full((8,), 0.5))).to(device, dtype)
    upstream = torch.ones(8, dtype=dtype, device=device)
    assert_same_as_exact(fused, plain, [gate_up], [upstream], dtype)


def test_a_gradient_that_is_not_contiguous(dtype, device):
    gate_up = drawn((5, 3, 8), dtype, device, seed=1)
    upstream = drawn((3, 5, 4), dtype, device, seed=2)

    def turned(function):
        return lambda x: function(x).transpose(0, 1)

    assert_same_as_exact(turned(fused), turned(plain), [gate_up], [upstream], dtype)


def test_the_gradient_takes_the_place_of_the_input(dtype, device):
    start = drawn((6, 10), dtype, device, seed=1).requires_grad_()
    gate_up = start * 1.0
    fused(gate_up).sum().backward()
    truth = start.detach().double().cpu().requires_grad_()
    plain(truth).sum().backward()
    assert_close(gate_up.detach(), truth.grad, dtype)
    assert torch.equal(gate_up, start.grad)


def test_a_second_backward_is_refused(device):
    y = fused(drawn((6, 10), torch.float32, device, seed=1).requires_grad_() * 1.0).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_without_gradients_the_input_stays(dtype, device):
    gate_up = drawn((6, 10), dtype, device, seed=1)
    before = gate_up.clone()
    with torch.inference_mode():
        y = fused(gate_up)
    assert torch.equal(gate_up, before)
    assert torch.equal(y, fused(gate_up.requires_grad_()))


def test_where_the_kernel_is_used(device, monkeypatch):
    calls = []
    monkeypatch.setattr(kernels.swiglu, "swiglu", calls.append)
    gate_up = drawn((6, 10), torch.float32, device, seed=1)
    dispatched(gate_up, fused=True)
    dispatched(gate_up, fused=False)
    dispatched(gate_up.double(), fused=True)
    assert len(calls) == 1
    assert calls[0] is gate_up
