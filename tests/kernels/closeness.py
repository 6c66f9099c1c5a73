"""What tests of kernels share: drawn numbers, and when a result is close to the exact one."""

import torch

# How many roundings of the dtype a result may be off. Half precision rounds a few numbers on the
# way; fp32 rounds every step, in sums of up to some thousand terms too.
ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 16}
FLOAT64_NOISE = 1e-12  # of a truth that should be 0


def drawn(shape, dtype, device, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def exact(x):
    """The same numbers in float64 on the CPU."""
    return None if x is None else x.detach().double().cpu().requires_grad_()


def outputs_and_gradients(function, inputs, upstreams):
    """Outputs of a function, then gradients of its inputs; None for an unused output or input.

    Args:
        function: returns a tensor or several.
        inputs: tensors, or None.
        upstreams: gradient of each output; None: nothing uses it.
    """
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    used = [(y, dy) for y, dy in zip(outputs, upstreams, strict=True) if dy is not None]
    roots, upstreams = zip(*used, strict=True)
    outputs = [y.detach().clone() for y in outputs]
    wanted = [x for x in leaves if x is not None]
    found = torch.autograd.grad(roots, wanted, [dy.detach() for dy in upstreams], allow_unused=True)
    return *outputs, *found


def assert_close(found, truth, dtype, roundings=None):
    """Off by a few roundings of each element and of a typical one.

    Args:
        found: in any dtype, on any device.
        truth: float64.
        dtype: whose roundings.
        roundings: how many; None: as usual.
    """
    if truth is None:
        assert found is None
        return
    assert found.shape == truth.shape
    unit = (roundings or ROUNDINGS[dtype]) * torch.finfo(dtype).eps
    bound = unit * (truth.abs() + truth.square().mean().sqrt()) + FLOAT64_NOISE
    excess = (found.double().cpu() - truth).abs() - bound
    assert (excess <= 0).all(), f"off by {excess.max().item():.3g} too much"


def assert_same_as_exact(fused, plain, inputs, upstreams, dtype):
    """A kernel's outputs and gradients against a torch form in float64."""
    found = outputs_and_gradients(fused, inputs, upstreams)
    truth = outputs_and_gradients(plain, map(exact, inputs), [exact(dy) for dy in upstreams])
    for one, expected in zip(found, truth, strict=True):
        assert_close(one, None if expected is None else expected.detach(), dtype)
