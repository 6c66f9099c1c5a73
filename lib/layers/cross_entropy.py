"""Cross entropy over logits cut along the vocabulary.

    log Z = log sum_v exp(logit_v)                      (natural logarithm, in fp32)
    loss  = log Z - (1 - e) logit_label - e mean_v logit_v + w (log Z)^2

With e the label smoothing (torch's definition: the target is (1 - e) one-hot plus e uniform) and
w the weight of the z-loss (PaLM), which keeps log Z near zero. The gradient by logit_v is, with p
the softmax, (1 + 2 w log Z) p_v - (1 - e) [v is the label] - e / V.

The full logits exist on no rank, and no rank holds its own slice in fp32: each reads its slice once
for some numbers of each row, the ranks join these by two small reductions, and backward writes the
gradient over the slice, with no communication.

    each rank, its columns    m, sum exp(logit - m), logit of the label, sum of logits    each [M]
    MAX over the group        m
    SUM over the group        sum of exp, rescaled to the joint m; logit of the label; sum of logits

Padding columns (ids from ``vocab_size`` on, there so that the size is a multiple of 128) count
as minus infinity and are no part of the mean, so the loss depends neither on how far the
vocabulary is padded nor on how it is cut.

Shape legend: S sequence, B batch, V this rank's slice of the padded vocabulary; in a slice, M = S B
rows and C = V columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lib.layers.fused import runs_kernels
from lib.parallel.collectives import all_reduce
from lib.parallel.groups import Group

_RowStatistics = Callable[[Tensor, Tensor, int, int], Tensor]
_WriteGradient = Callable[[Tensor, Tensor, int, int, Tensor], None]

# Elements of a slice that torch's operations take at once: 8 MiB in fp32, of which one operation
# has at most two.
_CHUNK = 2**21


class LossTerms(TypedDict, total=False):
    """What may be added to the plain cross entropy; nothing by default.

    Attributes:
        label_smoothing: probability mass spread evenly over the real vocabulary, in [0, 1].
        z_loss: weight of the squared log-partition function.
    """

    label_smoothing: float
    z_loss: float


@dataclass(frozen=True)
class _Loss:
    vocab_size: int
    group: Group
    label_smoothing: float
    z_loss: float
    fused: bool


def vocab_parallel_cross_entropy(
    logits_SBV: Tensor,
    labels_SB: Tensor,
    vocab_size: int,
    group: Group,
    *,
    fused: bool = True,
    **terms: Unpack[LossTerms],
) -> Tensor:
    """Loss of every token.

    Backward overwrites ``logits_SBV`` with its gradient, so the caller hands the logits over: they
    are not to be read after backward, which can run once. Without a gradient they stay as they are.

    Args:
        logits_SBV: this rank's slice of the logits, [S, B, V_padded / T], any float dtype.
        labels_SB: global token ids, int64 [S, B], below ``vocab_size``.
        vocab_size: real vocabulary; later columns are padding.
        group: tensor-parallel group.
        fused: whether to use fused kernels where they run; else torch's operations.
        **terms: ``label_smoothing`` and ``z_loss``.

    Returns:
        Losses in nats, at least fp32, [S, B], the same on every rank.
    """
    smoothing, z_loss = terms.get("label_smoothing", 0.0), terms.get("z_loss", 0.0)
    loss = _Loss(vocab_size, group, smoothing, z_loss, fused)
    logits_MC = logits_SBV.flatten(0, -2).contiguous()
    losses_M: Tensor = _VocabParallelCrossEntropy.apply(logits_MC, labels_SB.flatten(), loss)
    return losses_M.view(labels_SB.shape)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        logits_MC: Tensor,
        labels_M: Tensor,
        loss: _Loss,
    ) -> Tensor:
        columns, smoothing = logits_MC.shape[1], loss.label_smoothing
        ctx.loss, ctx.first = loss, loss.group.rank * columns
        ctx.real = min(max(0, loss.vocab_size - ctx.first), columns)
        row_statistics, _ = _passes(logits_MC, fused=loss.fused)
        statistics = row_statistics(logits_MC, labels_M, ctx.first, ctx.real)
        max_M = all_reduce(statistics[0].clone(), loss.group, dist.ReduceOp.MAX)
        # A rank without a real column gives 0 exp(-inf), that is nothing.
        statistics[1] *= (statistics[0] - max_M).exp_()
        sums = all_reduce(statistics[1 : 4 if smoothing > 0.0 else 3], loss.group)
        log_total_M = sums[0].log()
        # Differences of logits: of size one however large the logits are, so little is lost.
        losses_M = log_total_M + (1.0 - smoothing) * (max_M - sums[1])
        if smoothing > 0.0:
            losses_M += smoothing * (max_M - sums[2] / loss.vocab_size)
        factor_M = sums[0].reciprocal()
        if loss.z_loss > 0.0:
            log_z_M = max_M + log_total_M
            losses_M += loss.z_loss * log_z_M.square()
            factor_M *= 1.0 + 2.0 * loss.z_loss * log_z_M  # the slope of the loss by log Z
        ctx.save_for_backward(logits_MC, labels_M, max_M, factor_M)
        return losses_M

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor, None, None]:
        logits_MC, labels_M, max_M, factor_M = ctx.saved_tensors
        loss: _Loss = ctx.loss
        smoothing, share = loss.label_smoothing, loss.label_smoothing / loss.vocab_size
        weights_4M = torch.stack(
            (max_M, grads[0] * factor_M, grads[0] * (1.0 - smoothing), grads[0] * share)
        )
        grad_MC = logits_MC.detach()  # the same memory
        _, write_gradient = _passes(grad_MC, fused=loss.fused)
        write_gradient(grad_MC, labels_M, ctx.first, ctx.real, weights_4M)
        return grad_MC, None, None


def _passes(logits: Tensor, *, fused: bool) -> tuple[_RowStatistics, _WriteGradient]:
    """The two passes over a slice: kernels, or torch's operations."""
    if fused and runs_kernels(logits):
        from kernels.cross_entropy import row_statistics, write_gradient

        return row_statistics, write_gradient
    return _row_statistics, _write_gradient


def _chunks(logits_MC: Tensor) -> Iterator[slice]:
    """Rows to take at once."""
    rows, columns = logits_MC.shape
    step = max(1, _CHUNK // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _row_statistics(logits_MC: Tensor, labels_M: Tensor, first: int, real: int) -> Tensor:
    """As ``kernels.cross_entropy.row_statistics``; at least fp32."""
    dtype = torch.promote_types(logits_MC.dtype, torch.float32)
    statistics = logits_MC.new_zeros((4, len(labels_M)), dtype=dtype)
    maximum, exponentials, label_logit, plain = statistics
    column, elsewhere = _place(labels_M, first, logits_MC.shape[1])
    taken = logits_MC.gather(1, column).squeeze(1)
    label_logit.copy_(taken.masked_fill_(elsewhere, 0.0))
    if real == 0:
        maximum.fill_(float("-inf"))
        return statistics
    for rows in _chunks(logits_MC):
        logits = logits_MC[rows, :real]
        maximum[rows] = logits.amax(1)
        plain[rows] = logits.sum(1, dtype=dtype)
        # A maximum of minus infinity would give the difference of two infinities.
        shift = maximum[rows].masked_fill(maximum[rows] == float("-inf"), 0.0)
        exponentials[rows] = (logits - shift.unsqueeze(1)).exp_().sum(1)
    return statistics


def _write_gradient(
    logits_MC: Tensor, labels_M: Tensor, first: int, real: int, weights_4M: Tensor
) -> None:
    """As ``kernels.cross_entropy.write_gradient``."""
    logits_MC[:, real:] = 0.0
    if real == 0:
        return
    maximum, factor, label_weight, uniform_weight = weights_4M.unsqueeze(2)
    column, elsewhere = _place(labels_M, first, real)
    label_weight = label_weight.masked_fill(elsewhere.unsqueeze(1), 0.0)
    for rows in _chunks(logits_MC):
        gradient = (logits_MC[rows, :real] - maximum[rows]).exp_()
        gradient.mul_(factor[rows]).sub_(uniform_weight[rows])
        gradient.scatter_add_(1, column[rows], -label_weight[rows])
        logits_MC[rows, :real] = gradient


def _place(labels_M: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """The column of each label, [M, 1], and whether another rank has it (then the first), [M]."""
    column_M = labels_M - first
    elsewhere_M = (column_M < 0) | (column_M >= columns)
    return column_M.masked_fill(elsewhere_M, 0).unsqueeze(1), elsewhere_M
