"""The fused residual addition and layer norm against torch's in float64."""

import pytest
import torch

import kernels.layer_norm
from lib.layers.norm import LayerNorm, add_layer_norm
from lib.parallel.groups import ParallelGroups
from tests.kernels.closeness import (
    assert_close,
    assert_same_as_exact,
    drawn,
    exact,
    outputs_and_gradients,
)

EPSILON = 1e-5
# Rows of one tile and of several, of one program and of several, whole tiles and odd ones.
SHAPES = [(5, 1), (3, 2, 7), (1300, 7), (3, 7, 128), (2, 5, 200), (9, 2048), (3, 4099)]
# More tiles than programs on a GPU.
GPU_SHAPES = [(2000, 2048), (20000, 100), (1200, 8192)]


def fused(*inputs):
    return kernels.layer_norm.layer_norm(*inputs, EPSILON)


def plain(*inputs):
    return add_layer_norm(*inputs, EPSILON, fused=False)


def inputs_of(shape, dtype, device, *, branch):
    return [
        drawn(shape, dtype, device, seed=1),
        drawn(shape, dtype, device, seed=2) if branch else None,
        drawn(shape[-1:], dtype, device, seed=3),
        drawn(shape[-1:], dtype, device, seed=4),
    ]


def upstreams_of(shape, dtype, device):
    return [drawn(shape, dtype, device, seed=5), drawn(shape, dtype, device, seed=6)]


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape, branch, dtype, device):
    inputs = inputs_of(shape, dtype, device, branch=branch)
    assert_same_as_exact(fused, plain, inputs, upstreams_of(shape, dtype, device), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_many_rows(shape, dtype, device):
    inputs = inputs_of(shape, dtype, device, branch=True)
    assert_same_as_exact(fused, plain, inputs, upstreams_of(shape, dtype, device), dtype)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("unused", [0, 1])
def test_an_output_that_nothing_uses(unused, branch, dtype, device):
    inputs = inputs_of((6, 40), dtype, device, branch=branch)
    upstreams = upstreams_of((6, 40), dtype, device)
    upstreams[unused] = None
    assert_same_as_exact(fused, plain, inputs, upstreams, dtype)


def test_a_large_mean_takes_no_digits_from_the_variance(device):
    """Fault: the mean square less the squared mean, in fp32, is off by a tenth here."""
    inputs = inputs_of((6, 200), torch.float32, device, branch=False)
    inputs[0] += 1000.0  # leaves steps of 6e-5 between numbers of order one
    upstreams = upstreams_of((6, 200), torch.float32, device)
    found = outputs_and_gradients(fused, inputs, upstreams)
    truth = outputs_and_gradients(plain, map(exact, inputs), map(exact, upstreams))
    for one, expected in zip(found, truth, strict=True):
        # The mean is rounded, by up to half a step.
        assert_close(one, expected.detach(), torch.float32, roundings=1000)


def test_the_stream_is_rounded_once(dtype, device):
    x, branch, *weights = inputs_of((4, 64), dtype, device, branch=True)
    assert torch.equal(fused(x, branch, *weights)[0], x + branch)
    assert fused(x, None, *weights)[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0)], ids=str)
def test_rows_in_another_order(order, dtype, device):
    """Tensors that are not contiguous, also gradients."""
    shape = (3, 4, 3)
    inputs = inputs_of(shape, dtype, device, branch=True)
    upstreams = upstreams_of(shape, dtype, device)

    def turned(function):
        def norm(x, branch, *weights):
            outputs = function(x.permute(order), branch.permute(order), *weights)
            return [y.permute(order) for y in outputs]

        return norm

    assert_same_as_exact(turned(fused), turned(plain), inputs, upstreams, dtype)


def test_weights_have_fp32_gradients(dtype, device):
    """Many rows add up with no rounding to the weights' own dtype."""
    x, _, *weights = inputs_of((300, 24), dtype, device, branch=False)
    upstream = drawn((300, 24), dtype, device, seed=5)
    for weight in weights:
        weight.requires_grad_()
        weight.grad_dtype = torch.float32
    fused(x, None, *weights)[1].backward(upstream)
    inputs = [exact(x), None, *map(exact, weights)]
    truth = outputs_and_gradients(plain, inputs, [None, exact(upstream)])[-2:]
    for weight, expected in zip(weights, truth, strict=True):
        assert weight.grad.dtype == torch.float32
        assert_close(weight.grad, expected, torch.float32)


def test_without_gradients(dtype, device):
    x, branch, weight, bias = inputs_of((4, 64), dtype, device, branch=True)
    with_graph = fused(x, branch, weight.clone().requires_grad_(), bias)
    with torch.inference_mode():
        for found, expected in zip(fused(x, branch, weight, bias), with_graph, strict=True):
            assert torch.equal(found, expected)


def test_the_module_uses_the_kernel(device, monkeypatch):
    calls = []
    monkeypatch.setattr(
        kernels.layer_norm, "layer_norm", lambda *inputs: calls.append(inputs) or (1, 2)
    )
    x = drawn((2, 3, 8), torch.float32, device, seed=1)
    for uses_kernels in (True, False):
        layer = LayerNorm(8, EPSILON, ParallelGroups(), fused=uses_kernels).to(device)
        layer(x, x)
        layer.double()(x.double())
    assert len(calls) == 1
    assert calls[0][0] is calls[0][1] is x
    assert calls[0][4] == EPSILON
