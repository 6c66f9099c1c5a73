"""Where the fused kernels of ``kernels`` can run; elsewhere layers use torch's own operations.

A layer is built with ``fused`` or without (``runtime.kernels``). With it, each call asks here
whether its tensors can be served, so that one model runs on any device and in any number type.
"""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from lib.layers.gpu_limits import OLDEST_FOR_TRITON

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_kernels(x: Tensor) -> bool:
    """Whether a fused kernel can take ``x``: on a GPU that Triton knows, or by its interpreter."""
    if x.dtype not in _DTYPES or not _has_triton():
        return False
    return _can_compile(x.device) if x.is_cuda else os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _can_compile(device: torch.device) -> bool:
    return (
        torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= OLDEST_FOR_TRITON
    )
