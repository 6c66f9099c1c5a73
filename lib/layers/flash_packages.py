"""The packages flash-attn (2 and 3) and flash-attn-4, which are used where somebody installed them.

| package | module | GPUs | dropout |
|---|---|---|---|
| flash-attn 2 | flash_attn.flash_attn_interface | 8.0 and later | yes |
| flash-attn 3 | flash_attn_interface | 9.x (Hopper) | no |
| flash-attn-4 (pre-release) | flash_attn.cute | 9.0 and later | no |

None is a dependency of this project. Only flash-attn-4 was ever run here (4.0.0b36 on an H200:
right at four shapes, forward and backward); the calls follow the README of flash-attn 2, the source
of flash-attn 3 (``hopper/flash_attn_interface.py``) and that of flash-attn-4. All three take
[batch, sequence, heads, head dimension], any strides with a contiguous last dimension, fewer key
and value heads than query heads, and are causal from the last key; some give the logarithm of the
sums beside the output.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lib.layers.attention_limits import FLASH_ATTN_2, FLASH_ATTN_4, package_modules
from lib.layers.gpu_limits import Capability


@dataclass(frozen=True)
class FlashFunctions:
    """The causal attention of a package.

    Attributes:
        module: its module, with flash_attn_func and flash_attn_varlen_func.
        options: arguments of either function.
    """

    module: ModuleType
    options: dict[str, object]

    def whole(self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        """Attention within each sequence, [B, S, N, D]."""
        attend: Callable[..., Any] = self.module.flash_attn_func
        return _output(attend(q_BSND, k_BSGD, v_BSGD, **self.options))

    def by_document(self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, **cuts: object) -> Tensor:
        """Attention within each document of a row of T tokens, [T, N, D].

        Args:
            q_TND: queries.
            k_TGD: keys.
            v_TGD: values.
            cuts: cu_seqlens_q and _k, max_seqlen_q and _k.
        """
        attend: Callable[..., Any] = self.module.flash_attn_varlen_func
        return _output(attend(q_TND, k_TGD, v_TGD, **cuts, **self.options))


def flash_attn(device: torch.device, dropout: float) -> FlashFunctions:
    """The functions of flash-attn 3 where it can serve, else of flash-attn 2."""
    name = _version(torch.cuda.get_device_capability(device), dropout)
    # Only version 2 knows the argument.
    return _functions(name, {"dropout_p": dropout} if name == FLASH_ATTN_2 else {})


def flash_attn_4() -> FlashFunctions:
    """The functions of flash-attn-4."""
    return _functions(FLASH_ATTN_4, {})


def why_no_flash_attn(capability: Capability, dropout: float) -> str | None:
    """Why flash-attn cannot be imported; None if it can."""
    return why_no_module(_version(capability, dropout))


def why_no_module(name: str) -> str | None:
    """Why a module cannot be imported; None if it can."""
    found = _imported(name)
    return found if isinstance(found, str) else None


def _version(capability: Capability, dropout: float) -> str:
    names = package_modules("flash_attn", capability, dropout)
    return next((name for name in names if why_no_module(name) is None), names[-1])


def _functions(name: str, options: dict[str, object]) -> FlashFunctions:
    module = _imported(name)
    assert isinstance(module, ModuleType), module
    deterministic = torch.are_deterministic_algorithms_enabled()
    return FlashFunctions(module, {"causal": True, "deterministic": deterministic, **options})


@cache
def _imported(name: str) -> ModuleType | str:
    """The module, or why there is none: a package built for another torch raises all sorts."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"needs {name}, which cannot be imported ({lines[0]})"


def _output(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return found[0] if isinstance(found, tuple) else found
