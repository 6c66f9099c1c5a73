"""The flash-attn packages, with stand-ins that take the documented arguments and no others."""

import sys
from types import ModuleType

import pytest
import torch

from lib.layers import flash_packages
from lib.layers.attention import attention_backend
from lib.layers.attention_limits import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4
from tests.layers.test_attention import (
    ONE,
    STARTS,
    by_formula,
    document_kernel,
    drawn,
    fused_views,
    several,
)
from tests.reference import FLOAT64

HOPPER, AMPERE = (9, 0), (8, 0)


def attended(q, k, v):
    """[B, S, heads, D] as the packages have it."""
    output = by_formula(*(x.transpose(0, 1) for x in (q, k, v)), [ONE[0]] * len(q))
    return output.transpose(0, 1).unflatten(-1, q.shape[2:])


def version_2(calls):
    module = ModuleType(FLASH_ATTN_2)

    def flash_attn_func(q, k, v, dropout_p=0.0, *, causal, deterministic):
        calls.append((FLASH_ATTN_2, dropout_p, causal, deterministic))
        return attended(q, k, v)

    def flash_attn_varlen_func(q, k, v, *, dropout_p=0.0, causal, deterministic, **cuts):
        calls.append((FLASH_ATTN_2, dropout_p, causal, deterministic))
        return document_kernel([])(q, k, v, **cuts)

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def newer(name, calls, result):
    """Versions 3 and 4 know no dropout; the order of their arguments differs from 2 after v."""
    module = ModuleType(name)

    def flash_attn_func(q, k, v, *, causal, deterministic):
        calls.append((name, None, causal, deterministic))
        return result(attended(q, k, v))

    def flash_attn_varlen_func(q, k, v, *, causal, deterministic, **cuts):
        calls.append((name, None, causal, deterministic))
        return result(document_kernel([])(q, k, v, **cuts))

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


@pytest.fixture
def installed(monkeypatch):
    """Installs stand-ins: a function of the GPU and the packages; it gives the list of calls."""
    flash_packages._imported.cache_clear()

    def install(capability, *names, result=lambda output: (output, "sums")):
        calls = []
        for name in (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4):
            module = None  # None makes Python raise ImportError
            if name in names:
                module = version_2(calls) if name == FLASH_ATTN_2 else newer(name, calls, result)
            monkeypatch.setitem(sys.modules, name, module)
        parent = ModuleType("flash_attn")
        parent.__path__ = []
        monkeypatch.setitem(sys.modules, "flash_attn", parent)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return calls

    yield install
    flash_packages._imported.cache_clear()


CHOICES = [
    ("flash_attn", AMPERE, (FLASH_ATTN_2, FLASH_ATTN_3), FLASH_ATTN_2),
    ("flash_attn", HOPPER, (FLASH_ATTN_2,), FLASH_ATTN_2),
    ("flash_attn", HOPPER, (FLASH_ATTN_2, FLASH_ATTN_3), FLASH_ATTN_3),
    ("flash_attn_4", HOPPER, (FLASH_ATTN_4,), FLASH_ATTN_4),
]


@pytest.mark.parametrize(("backend", "capability", "packages", "used"), CHOICES)
@pytest.mark.parametrize("starts", [ONE, STARTS])
def test_forward_and_gradients(installed, backend, capability, packages, used, starts):
    calls = installed(capability, *packages)
    fused, views = fused_views(4, 2)
    output = attention_backend(backend)(*views, 0.0, several(starts))
    expected = by_formula(*views, starts)
    torch.testing.assert_close(output, expected, **FLOAT64)
    (found,) = torch.autograd.grad(output.sin().sum(), fused)
    (truth,) = torch.autograd.grad(expected.sin().sum(), fused)
    torch.testing.assert_close(found, truth, **FLOAT64)
    assert calls == [(used, 0.0 if used == FLASH_ATTN_2 else None, True, False)]


def test_older_releases_of_3_give_the_output_alone(installed):
    installed(HOPPER, FLASH_ATTN_3, result=lambda output: output)
    inputs = drawn(4, 2)
    output = attention_backend("flash_attn")(*inputs, 0.0)
    torch.testing.assert_close(output, by_formula(*inputs, ONE), **FLOAT64)


def test_dropout_is_for_version_2(installed):
    calls = installed(HOPPER, FLASH_ATTN_2, FLASH_ATTN_3)
    attention_backend("flash_attn")(*drawn(2, 2), 0.25)
    assert calls == [(FLASH_ATTN_2, 0.25, True, False)]


def test_the_same_bits_are_asked_for_where_torch_is_asked_for_them(installed):
    calls = installed(HOPPER, FLASH_ATTN_4)
    torch.use_deterministic_algorithms(mode=True)
    try:
        attention_backend("flash_attn_4")(*drawn(2, 2), 0.0)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert calls == [(FLASH_ATTN_4, None, True, True)]


def test_what_is_missing_or_broken_is_told(installed, monkeypatch):
    installed(HOPPER, FLASH_ATTN_3)
    assert flash_packages.why_no_flash_attn(HOPPER, 0.0) is None
    told = flash_packages.why_no_flash_attn(HOPPER, 0.5)
    assert told.startswith("needs flash_attn.flash_attn_interface, which cannot be imported (")
    assert "cannot be imported" in flash_packages.why_no_module(FLASH_ATTN_4)
    flash_packages._imported.cache_clear()

    def broken(name):
        raise OSError("undefined symbol: of another torch\nand more")

    monkeypatch.setattr(flash_packages.importlib, "import_module", broken)
    reason = flash_packages.why_no_module(FLASH_ATTN_4)
    assert reason == (
        "needs flash_attn.cute, which cannot be imported (undefined symbol: of another torch)"
    )
