"""Kernels against torch: right ones pass, one that is made wrong on purpose is named.

On a GPU where there is one, else by Triton's interpreter.
"""

import pytest
import torch

import kernels.swiglu
from lib.hardware import fused_ops
from lib.hardware.fused_ops import FUSED_OPS, check_kernels
from tests.kernels.conftest import HAS_GPU

DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
SWIGLU = [op for op in FUSED_OPS if op.name == "SwiGLU"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        # The interpreter is slow: the other types are for GPUs.
        monkeypatch.setattr(fused_ops, "served_dtypes", lambda _device: [torch.float32])


def test_all_are_right():
    findings = list(check_kernels(DEVICE))
    assert [finding.status for finding in findings] == ["ok"] * len(FUSED_OPS)
    assert all("float32" in finding.seen for finding in findings)


def too_large(x):
    return true_swiglu(x) * 1.0001


def last_element_forgotten(x):
    found = true_swiglu(x).clone()
    found.view(-1)[-1] = 0.0
    return found


def no_number(x):
    return true_swiglu(x) * float("nan")


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


def wrong_gradient(x):
    return true_swiglu(WrongGradient.apply(x))


true_swiglu = kernels.swiglu.swiglu


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (too_large, "output 1"),
        (last_element_forgotten, "output 1"),
        (no_number, "output 1"),
        (wrong_gradient, "gradient 1"),
    ],
)
def test_a_wrong_kernel_is_named(monkeypatch, wrong, word):
    monkeypatch.setattr(kernels.swiglu, "swiglu", wrong)
    (finding,) = check_kernels(DEVICE, SWIGLU)
    assert (finding.name, finding.status) == ("kernel: SwiGLU", "failed")
    assert word in finding.seen
    assert "runtime.kernels: torch" in finding.remedy


def test_a_kernel_that_does_not_compile_is_explained(monkeypatch):
    def raises(_x):
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    monkeypatch.setattr(kernels.swiglu, "swiglu", raises)
    (finding,) = check_kernels(DEVICE, SWIGLU)
    assert finding.status == "failed"
    assert "gcc" in finding.remedy


def test_a_cpu_has_no_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    statuses = [finding.status for finding in check_kernels(torch.device("cpu"))]
    assert statuses == ["not applicable"]
