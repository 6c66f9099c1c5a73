"""Normalisation over the hidden dimension.

LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias
RMSNorm:   x / sqrt(mean(x^2) + eps) * weight

Every tensor-parallel rank holds the weights whole. Where the ranks normalise other vectors (their
parts of the sequence, or their own heads), each has a part of the weights' gradient, and the parts
are summed.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lib.parallel.collectives import copy_to_group, sum_partial_gradient
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import local, replica


class LayerNorm(nn.Module):
    """Layer normalisation with weight and bias, [..., H] to [..., H]."""

    def __init__(self, size: int, epsilon: float, groups: ParallelGroups) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.groups = groups
        self.weight = replica((size,), groups.tp)
        self.bias = replica((size,), groups.tp)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        weight = sum_partial_gradient(local(self.weight), self.groups)
        bias = sum_partial_gradient(local(self.bias), self.groups)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with weight, [..., H] to [..., H].

    Args:
        size: H.
        epsilon: added to the mean square.
        groups: groups of this rank.
        input_is_cut: whether each rank normalises its own heads, with or without sequence
            parallelism. Ranks that share a head (fewer key heads than ranks) each bring the
            gradient from their own query heads: the sum is right for them too.
    """

    def __init__(
        self, size: int, epsilon: float, groups: ParallelGroups, *, input_is_cut: bool = False
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.groups = groups
        self.input_is_cut = input_is_cut
        self.weight = replica((size,), groups.tp)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        weight = local(self.weight)
        if self.input_is_cut:
            weight = copy_to_group(weight, self.groups.tp)
        else:
            weight = sum_partial_gradient(weight, self.groups)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


def build_norm(kind: str, size: int, epsilon: float, groups: ParallelGroups) -> LayerNorm | RMSNorm:
    """The normalisation of hidden states named ``layernorm`` or ``rmsnorm``."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](size, epsilon, groups)
