"""Kernels run by Triton's interpreter where there is no GPU: asked for before any is imported."""

from tests.kernels.conftest import HAS_GPU

__all__ = ["HAS_GPU"]
