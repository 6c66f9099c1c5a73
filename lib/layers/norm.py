"""Normalisation over the last dimension.

LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias
RMSNorm:   x / sqrt(mean(x^2) + eps) * weight

Between layers the residual stream and the branch that is still to be added to it come in, and the
sum goes out beside its normalised form: a fused kernel adds and normalises in one pass.

Every tensor-parallel rank holds the weights whole. Where the ranks normalise other vectors (their
parts of the sequence, or their own heads), each rank's gradient of the weights is a part, and
``replica`` is told so: the parts are summed once, at the end of a step.

Shape legend: H size of the normalised vectors.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lib.layers.fused import runs_kernels
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import replica


def add_layer_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """Layer normalisation of ``x + branch``.

    Args:
        x: [..., H], any float dtype.
        branch: what to add, of the same shape and dtype; None: nothing.
        weight: [H].
        bias: [H].
        epsilon: added to the variance.
        fused: whether to use the fused kernel where it can run.

    Returns:
        The sum (``x`` itself without a branch) and the normalised sum.
    """
    if fused and runs_kernels(x):
        from kernels.layer_norm import layer_norm

        return layer_norm(x, branch, weight, bias, epsilon)
    stream = x if branch is None else x + branch
    return stream, F.layer_norm(stream, weight.shape, weight, bias, epsilon)


def add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation of ``x + branch``; see ``add_layer_norm``."""
    if fused and runs_kernels(x):
        from kernels.rms_norm import rms_norm

        return rms_norm(x, branch, weight, epsilon)
    stream = x if branch is None else x + branch
    return stream, F.rms_norm(stream, weight.shape, weight, epsilon)


class LayerNorm(nn.Module):
    """Layer normalisation between layers.

    Args:
        size: H.
        epsilon: added to the variance.
        groups: groups of this rank.
        fused: whether to use the fused kernel where it can run.
    """

    def __init__(
        self, size: int, epsilon: float, groups: ParallelGroups, *, fused: bool = True
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.fused = fused
        self.weight = replica((size,), groups.tp, sums_gradient=groups.sequence_parallel)
        self.bias = replica((size,), groups.tp, sums_gradient=groups.sequence_parallel)

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream ``x + branch`` and its normalised form, each [..., H]."""
        return add_layer_norm(x, branch, self.weight, self.bias, self.epsilon, fused=self.fused)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation between layers; arguments as of LayerNorm."""

    def __init__(
        self, size: int, epsilon: float, groups: ParallelGroups, *, fused: bool = True
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.fused = fused
        self.weight = replica((size,), groups.tp, sums_gradient=groups.sequence_parallel)

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream ``x + branch`` and its normalised form, each [..., H]."""
        return add_rms_norm(x, branch, self.weight, self.epsilon, fused=self.fused)


class HeadNorm(nn.Module):
    """Root-mean-square normalisation of each head; arguments as of LayerNorm, H a head's size.

    Each rank normalises its own heads, with or without sequence parallelism. Ranks that share a
    head (fewer key heads than ranks) each bring the gradient from their own query heads: the sum
    over the ranks is right for them too.
    """

    def __init__(
        self, size: int, epsilon: float, groups: ParallelGroups, *, fused: bool = True
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.fused = fused
        self.weight = replica((size,), groups.tp, sums_gradient=True)

    def forward(self, x_SBNH: Tensor) -> Tensor:
        """The normalised heads, [S, B, N, H]; they may be a part of a wider tensor."""
        return add_rms_norm(x_SBNH, None, self.weight, self.epsilon, fused=self.fused)[1]


def build_norm(
    kind: str, size: int, epsilon: float, groups: ParallelGroups, *, fused: bool = True
) -> LayerNorm | RMSNorm:
    """The normalisation of hidden states named ``layernorm`` or ``rmsnorm``."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](size, epsilon, groups, fused=fused)
