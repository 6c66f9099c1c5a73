"""Activations of the feed-forward layer.

gelu:   0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))    (tanh form, as GPT-2)
swiglu: silu(gate) * up                                     (Shazeer, GLU variants)
"""

from torch import Tensor
from torch.nn import functional as F

from lib.layers.fused import runs_kernels


def gelu(up: Tensor) -> Tensor:
    """The tanh form of GELU, element by element; torch's own kernel is one pass already."""
    return F.gelu(up, approximate="tanh")


def swiglu(gate_up: Tensor, *, fused: bool) -> Tensor:
    """SiLU of the gate times the up projection, element by element.

    Args:
        gate_up: [..., 2 F], the gate first. The fused kernel's backward overwrites it with its
            gradient, so backward can run once, and nothing else may need its values then.
        fused: whether to use the fused kernel where it can run.

    Returns:
        [..., F].
    """
    if fused and runs_kernels(gate_up):
        from kernels.swiglu import swiglu as fused_swiglu

        return fused_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
