"""What a forward pass keeps is measured on the fused kernels, by Triton's interpreter."""

import pytest
import torch

from tests.kernels.conftest import interpret_kernels


@pytest.fixture
def interpreter(monkeypatch):
    if not torch.cuda.is_available():
        interpret_kernels()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
