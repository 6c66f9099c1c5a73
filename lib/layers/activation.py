"""Activations of the feed-forward layer.

gelu:   0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))    (tanh form, as GPT-2)
swiglu: silu(gate) * up                                     (Shazeer, GLU variants)
"""

from torch import Tensor
from torch.nn import functional as F


def gelu(up: Tensor) -> Tensor:
    """The tanh form of GELU, element by element."""
    return F.gelu(up, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times the up projection, element by element."""
    return F.silu(gate) * up
