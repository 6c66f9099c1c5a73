"""Kernels run on a GPU where there is one, elsewhere by Triton's interpreter.

Triton asks for TRITON_INTERPRET when a kernel's module is imported: all are imported here, before
any test module. Layers ask at each call: tests here run with it set, and no others, whose models
would go through the interpreter too.
"""

import importlib
import pkgutil

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import kernels

HAS_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16]


def interpret_kernels():
    """Makes functions that the interpreter can call of all kernels and of Triton's own library.

    The library's are compiled ones if anything imported it before; several packages do.
    """
    for module in (tl, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                setattr(module, name, InterpretedFunction(function.fn))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in pkgutil.iter_modules(kernels.__path__):
            importlib.import_module(f"kernels.{module.name}")


if HAS_GPU:
    DTYPES.append(torch.bfloat16)  # which the interpreter rounds wrongly
else:
    interpret_kernels()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory holds NaN: an element that a kernel forgets to write is found."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)
