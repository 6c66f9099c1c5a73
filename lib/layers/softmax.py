"""Softmax of attention scores: scaled, causal, with further hidden keys.

For attention that forms its scores, where no kernel runs that never does.
"""

import torch
from torch import Tensor

from lib.layers.fused import runs_kernels


def scaled_masked_softmax(
    scores_BNSK: Tensor, scale: float, hidden: Tensor | None, *, fused: bool
) -> Tensor:
    """The softmax of scale * scores over the keys that each query sees, at least in fp32.

    The caller hands the scores over, and backward can run once: with fused kernels the weights
    lie where the scores were, and the gradient of the scores comes to lie where the weights are.

    Args:
        scores_BNSK: [B, N, S, K] for S queries, level with the last of K keys; any float dtype,
            contiguous, not a leaf that wants a gradient.
        scale: factor on the scores.
        hidden: keys that are not seen besides later ones, bool, broadcast to the scores' shape;
            None: all others are seen.
        fused: whether to use fused kernels where they run; else torch's operations.

    Returns:
        Weights, [B, N, S, K], in the scores' dtype; zeros for a query that sees no key.
    """
    if fused and runs_kernels(scores_BNSK):
        from kernels import softmax

        return softmax.scaled_masked_softmax(scores_BNSK, scale, causal=True, hidden=hidden)
    queries, keys = scores_BNSK.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores_BNSK.device)
    unseen = later.triu_(1 + keys - queries)
    if hidden is not None:
        unseen = unseen | hidden
    wide = scores_BNSK.to(torch.promote_types(scores_BNSK.dtype, torch.float32)) * scale
    weights = wide.masked_fill(unseen, float("-inf")).softmax(-1)
    # A query that sees nothing has the softmax of no finite score, which is no number.
    return weights.masked_fill(unseen, 0.0).to(scores_BNSK.dtype)
