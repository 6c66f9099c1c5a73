"""The fused residual addition and RMS norm against torch's in float64."""

import pytest
import torch

import kernels.rms_norm
from lib.layers.norm import HeadNorm, RMSNorm, add_rms_norm
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


def fused(epsilon):
    return lambda *inputs: kernels.rms_norm.rms_norm(*inputs, epsilon)


def plain(epsilon):
    return lambda *inputs: add_rms_norm(*inputs, epsilon, fused=False)


def inputs_of(shape, dtype, device, *, branch):
    return [
        drawn(shape, dtype, device, seed=1),
        drawn(shape, dtype, device, seed=2) if branch else None,
        drawn(shape[-1:], dtype, device, seed=3),
    ]


def upstreams_of(shape, dtype, device):
    return [drawn(shape, dtype, device, seed=4), drawn(shape, dtype, device, seed=5)]


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape, branch, dtype, device):
    epsilon = 0.5 if shape[-1] == 1 else EPSILON  # one number is always the norm's own size
    inputs = inputs_of(shape, dtype, device, branch=branch)
    upstreams = upstreams_of(shape, dtype, device)
    assert_same_as_exact(fused(epsilon), plain(epsilon), inputs, upstreams, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_many_rows(shape, dtype, device):
    inputs = inputs_of(shape, dtype, device, branch=True)
    upstreams = upstreams_of(shape, dtype, device)
    assert_same_as_exact(fused(EPSILON), plain(EPSILON), inputs, upstreams, dtype)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("unused", [0, 1])
def test_an_output_that_nothing_uses(unused, branch, dtype, device):
    inputs = inputs_of((6, 40), dtype, device, branch=branch)
    upstreams = upstreams_of((6, 40), dtype, device)
    upstreams[unused] = None
    assert_same_as_exact(fused(EPSILON), plain(EPSILON), inputs, upstreams, dtype)


def test_the_stream_is_rounded_once(dtype, device):
    x, branch, weight = inputs_of((4, 64), dtype, device, branch=True)
    assert torch.equal(fused(EPSILON)(x, branch, weight)[0], x + branch)
    assert fused(EPSILON)(x, None, weight)[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("heads", [slice(0, 3), slice(3, 4), slice(1, 6)], ids=str)
def test_heads_of_a_wider_tensor(heads, dtype, device):
    inputs = [
        drawn((5, 2, 6, 24), dtype, device, seed=1),
        drawn((24,), dtype, device, seed=2),
    ]
    upstreams = [drawn((5, 2, heads.stop - heads.start, 24), dtype, device, seed=3)]

    def norm(function):
        return lambda wide, weight: function(wide[:, :, heads], None, weight)[1]

    assert_same_as_exact(norm(fused(EPSILON)), norm(plain(EPSILON)), inputs, upstreams, dtype)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)], ids=str)
def test_rows_in_another_order(order, dtype, device):
    """Strides that the kernel cannot follow, also those of gradients."""
    inputs = inputs_of((3, 4, 5, 6), dtype, device, branch=True)
    inputs[2] = drawn((3, 4, 5, 6)[order[3] : order[3] + 1], dtype, device, seed=3)
    upstreams = upstreams_of((3, 4, 5, 6), dtype, device)

    def norm(function):
        def turned(x, branch, weight):
            outputs = function(x.permute(order), branch.permute(order), weight)
            return [y.permute([order.index(dim) for dim in range(4)]) for y in outputs]

        return turned

    assert_same_as_exact(norm(fused(EPSILON)), norm(plain(EPSILON)), inputs, upstreams, dtype)


def test_the_weight_has_an_fp32_gradient(dtype, device):
    """Many rows add up with no rounding to the weight's own dtype."""
    x, _, weight = inputs_of((300, 24), dtype, device, branch=False)
    upstream = drawn((300, 24), dtype, device, seed=4)
    weight.requires_grad_()
    weight.grad_dtype = torch.float32
    fused(EPSILON)(x, None, weight)[1].backward(upstream)
    assert weight.grad.dtype == torch.float32
    inputs, upstreams = [exact(x), None, exact(weight)], [None, exact(upstream)]
    truth = outputs_and_gradients(plain(EPSILON), inputs, upstreams)[-1]
    assert_close(weight.grad, truth, torch.float32)


def test_without_gradients(dtype, device):
    x, branch, weight = inputs_of((4, 64), dtype, device, branch=True)
    with_graph = fused(EPSILON)(x, branch, weight.clone().requires_grad_())
    with torch.inference_mode():
        for found, expected in zip(fused(EPSILON)(x, branch, weight), with_graph, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("norm", [RMSNorm, HeadNorm])
def test_modules_use_the_kernel(norm, device, monkeypatch):
    calls = []
    monkeypatch.setattr(
        kernels.rms_norm, "rms_norm", lambda *inputs: calls.append(inputs) or (1, 2)
    )
    x = drawn((2, 3, 4, 8), torch.float32, device, seed=1)
    for uses_kernels in (True, False):
        layer = norm(8, EPSILON, ParallelGroups(), fused=uses_kernels).to(device)
        layer(x)
        layer.double()(x.double())
    assert len(calls) == 1
    assert calls[0][0] is x
    assert calls[0][3] == EPSILON
