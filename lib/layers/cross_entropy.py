"""Cross entropy over logits cut along the vocabulary.

    log Z = log sum_v exp(logit_v)                      (natural logarithm, in fp32)
    loss  = log Z - (1 - e) logit_label - e mean_v logit_v + w (log Z)^2

With e the label smoothing (torch's definition: the target is (1 - e) one-hot plus e uniform) and
w the weight of the z-loss (PaLM), which keeps log Z near zero. The gradient by logit_v is, with p
the softmax, (1 + 2 w log Z) p_v - (1 - e) [v is the label] - e / V.

The full logits exist on no rank. Three small reductions of [S, B] join the ranks: the maximum
(for a stable exponential), what is subtracted of logits, and the sum of exponentials. The gradient
is computed on the local slice, with no communication.

Padding columns (ids from ``vocab_size`` on, there so that the size is a multiple of 128) count
as minus infinity and are no part of the mean, so the loss depends neither on how far the
vocabulary is padded nor on how it is cut.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel.collectives import all_reduce
from lib.parallel.groups import Group


@dataclass(frozen=True)
class _Loss:
    vocab_size: int
    group: Group
    label_smoothing: float
    z_loss: float


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        logits_SBV: Tensor,
        labels_SB: Tensor,
        loss: _Loss,
    ) -> Tensor:
        columns, group = logits_SBV.shape[-1], loss.group
        first = group.rank * columns
        real = min(max(0, loss.vocab_size - first), columns)
        # An fp32 copy: exponentials replace it in place, the one large tensor kept for backward.
        z_SBV = logits_SBV.to(torch.promote_types(logits_SBV.dtype, torch.float32), copy=True)
        z_SBV[..., real:] = float("-inf")
        max_SB = all_reduce(z_SBV.amax(-1), group, dist.ReduceOp.MAX)
        z_SBV -= max_SB.unsqueeze(-1)
        index_SB = labels_SB - first
        elsewhere_SB = (index_SB < 0) | (index_SB >= columns)
        index_SB = index_SB.masked_fill(elsewhere_SB, 0)
        taken_SB = z_SBV.gather(-1, index_SB.unsqueeze(-1)).squeeze(-1)
        taken_SB = taken_SB.masked_fill(elsewhere_SB, 0.0)
        if loss.label_smoothing > 0.0:
            taken_SB *= 1.0 - loss.label_smoothing
            share = loss.label_smoothing / loss.vocab_size
            taken_SB += z_SBV[..., :real].sum(-1) * share
        taken_SB = all_reduce(taken_SB, group)
        z_SBV.exp_()
        total_SB = all_reduce(z_SBV.sum(-1), group)
        log_total_SB = total_SB.log()
        slope_SB: Tensor | None = None  # of the loss by log Z, where it is not 1
        losses_SB = log_total_SB - taken_SB
        if loss.z_loss > 0.0:
            log_z_SB = max_SB + log_total_SB
            losses_SB += loss.z_loss * log_z_SB.square()
            slope_SB = 1.0 + 2.0 * loss.z_loss * log_z_SB
        ctx.save_for_backward(z_SBV, total_SB, index_SB, elsewhere_SB, slope_SB)
        ctx.logits_dtype, ctx.loss, ctx.real = logits_SBV.dtype, loss, real
        return losses_SB

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        exp_SBV, total_SB, index_SB, elsewhere_SB, slope_SB = ctx.saved_tensors
        loss: _Loss = ctx.loss
        scale_SB = grads[0] if slope_SB is None else grads[0] * slope_SB
        # One pass over the large tensor: the softmax's divisor goes with the incoming gradient.
        grad_SBV = exp_SBV * (scale_SB / total_SB).unsqueeze(-1)
        label_SB = grads[0].to(grad_SBV.dtype).masked_fill(elsewhere_SB, 0.0)
        if loss.label_smoothing > 0.0:
            share = loss.label_smoothing / loss.vocab_size
            grad_SBV[..., : ctx.real] -= (grads[0] * share).unsqueeze(-1)
            label_SB = label_SB * (1.0 - loss.label_smoothing)
        grad_SBV.scatter_add_(-1, index_SB.unsqueeze(-1), -label_SB.unsqueeze(-1))
        return grad_SBV.to(ctx.logits_dtype), None, None


def vocab_parallel_cross_entropy(
    logits_SBV: Tensor,
    labels_SB: Tensor,
    vocab_size: int,
    group: Group,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss of every token.

    Args:
        logits_SBV: this rank's slice of the logits, [S, B, V_padded / T], any float dtype.
        labels_SB: global token ids, int64 [S, B], below ``vocab_size``.
        vocab_size: real vocabulary; later columns are padding.
        group: tensor-parallel group.
        label_smoothing: probability mass spread evenly over the real vocabulary, in [0, 1].
        z_loss: weight of the squared log-partition function.

    Returns:
        Losses in nats, at least fp32, [S, B], the same on every rank.
    """
    loss = _Loss(vocab_size, group, label_smoothing, z_loss)
    return _VocabParallelCrossEntropy.apply(logits_SBV, labels_SB, loss)
