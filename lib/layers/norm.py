"""Normalisation over the hidden dimension.

LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias
RMSNorm:   x / sqrt(mean(x^2) + eps) * weight
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lib.parallel.collectives import copy_to_group
from lib.parallel.groups import Group
from lib.parallel.storage import local, replica


class LayerNorm(nn.Module):
    """Layer normalisation with weight and bias, [..., H] to [..., H]."""

    def __init__(self, size: int, epsilon: float, group: Group) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = replica((size,), group)
        self.bias = replica((size,), group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        weight = local(self.weight)
        return F.layer_norm(x, weight.shape, weight, local(self.bias), self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with weight, [..., H] to [..., H].

    Where each rank normalises other vectors (``input_is_cut``: its own heads), a rank's gradient
    of the weight is a partial sum.
    """

    def __init__(
        self, size: int, epsilon: float, group: Group, *, input_is_cut: bool = False
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.sum_group = group if input_is_cut else Group()
        self.weight = replica((size,), group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        weight = copy_to_group(local(self.weight), self.sum_group)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


def build_norm(kind: str, size: int, epsilon: float, group: Group) -> LayerNorm | RMSNorm:
    """The normalisation named ``layernorm`` or ``rmsnorm``."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](size, epsilon, group)
