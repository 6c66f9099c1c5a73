"""Cross entropy over logits cut along the vocabulary.

    loss = log sum_v exp(logit_v) - logit_label          (natural logarithm, in fp32)

The full logits exist on no rank. Three small reductions of [S, B] join the ranks: the maximum
(for a stable exponential), the label's logit and the sum of exponentials. The gradient is
softmax minus the one-hot label, on the local slice, with no communication.

Padding columns (ids from ``vocab_size`` on, there so that the size is a multiple of 128) count
as minus infinity, so the loss does not depend on how far the vocabulary is padded.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel.collectives import all_reduce
from lib.parallel.groups import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        logits_SBV: Tensor,
        labels_SB: Tensor,
        vocab_size: int,
        group: Group,
    ) -> Tensor:
        columns = logits_SBV.shape[-1]
        first = group.rank * columns
        # An fp32 copy: exponentials replace it in place, the one large tensor kept for backward.
        z_SBV = logits_SBV.to(torch.promote_types(logits_SBV.dtype, torch.float32), copy=True)
        z_SBV[..., max(0, vocab_size - first) :] = float("-inf")
        z_SBV -= all_reduce(z_SBV.amax(-1), group, dist.ReduceOp.MAX).unsqueeze(-1)
        index_SB = labels_SB - first
        elsewhere_SB = (index_SB < 0) | (index_SB >= columns)
        index_SB = index_SB.masked_fill(elsewhere_SB, 0)
        target_SB = z_SBV.gather(-1, index_SB.unsqueeze(-1)).squeeze(-1)
        target_SB = all_reduce(target_SB.masked_fill(elsewhere_SB, 0.0), group)
        z_SBV.exp_()
        total_SB = all_reduce(z_SBV.sum(-1), group)
        ctx.save_for_backward(z_SBV, total_SB, index_SB, elsewhere_SB)
        ctx.logits_dtype = logits_SBV.dtype
        return total_SB.log() - target_SB

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        exp_SBV, total_SB, index_SB, elsewhere_SB = ctx.saved_tensors
        # One pass over the large tensor: the softmax's divisor goes with the incoming gradient.
        grad_SBV = exp_SBV * (grads[0] / total_SB).unsqueeze(-1)
        label_SB = grads[0].to(grad_SBV.dtype).masked_fill(elsewhere_SB, 0.0)
        grad_SBV.scatter_add_(-1, index_SB.unsqueeze(-1), -label_SB.unsqueeze(-1))
        return grad_SBV.to(ctx.logits_dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits_SBV: Tensor, labels_SB: Tensor, vocab_size: int, group: Group
) -> Tensor:
    """Loss of every token.

    Args:
        logits_SBV: this rank's slice of the logits, [S, B, V_padded / T], any float dtype.
        labels_SB: global token ids, int64 [S, B], below ``vocab_size``.
        vocab_size: real vocabulary; later columns are padding.
        group: tensor-parallel group.

    Returns:
        Losses in nats, at least fp32, [S, B], the same on every rank.
    """
    return _VocabParallelCrossEntropy.apply(logits_SBV, labels_SB, vocab_size, group)
