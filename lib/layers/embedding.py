"""Token embedding cut over the vocabulary, learned positions, and the output projection.

Shape legend: S sequence, B batch, H hidden, V padded vocabulary, T tensor-parallel degree. Hidden
states are [S, B, H], or [S/T, B, H] under sequence parallelism.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lib.layers.fused import runs_kernels
from lib.layers.linear import column_parallel
from lib.layers.parameter_gradient import overwritable
from lib.parallel.collectives import leave_tensor_parallel
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import replica, shard


def _own_rows(tokens_SB: Tensor, rows: int, group: Group) -> Tensor:
    """Where this rank holds the tokens' vectors among its ``rows``; -1: another rank does."""
    if group.size == 1:
        return tokens_SB
    index_SB = tokens_SB - group.rank * rows
    return index_SB.masked_fill((index_SB < 0) | (index_SB >= rows), -1)


def _look_up(weight: Tensor, tokens_SB: Tensor, group: Group) -> Tensor:
    """The vectors that this rank holds, [S, B, H], and zeros for those of other ranks."""
    if group.size == 1:
        return F.embedding(tokens_SB, weight)
    rows = weight.shape[0]
    # Others are spread over all rows: their gradients are zeros, and adding those to one row
    # takes turns.
    x_SBH = F.embedding(tokens_SB.remainder(rows), weight)
    outside_SB = _own_rows(tokens_SB, rows, group) < 0
    return x_SBH.masked_fill(outside_SB.unsqueeze(-1), 0.0)


class _LookUp(torch.autograd.Function):
    """``_look_up``, with a gradient that goes straight into the weight's fp32 ``grad``.

    Torch would fill a table with zeros, add to it, and add the whole of it to ``grad``; of the
    three, this adds the rows that occur. Without such a ``grad`` it returns a table.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        weight: Tensor,
        tokens_SB: Tensor,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(tokens_SB)
        ctx.weight, ctx.group = weight, group
        return _look_up(weight, tokens_SB, group)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        from kernels.embedding_gradient import add_rows

        (tokens_SB,), weight = ctx.saved_tensors, ctx.weight
        total = weight.grad if weight.is_leaf else None
        index_M = _own_rows(tokens_SB, weight.shape[0], ctx.group).reshape(-1)
        grad_MH = grads[0].reshape(-1, weight.shape[1]).contiguous()
        if total is not None and total.dtype == torch.float32:
            add_rows(total, index_M, grad_MH)
            return None, None, None
        table = torch.zeros_like(weight, dtype=torch.float32)
        add_rows(table, index_M, grad_MH)
        return table, None, None


class VocabParallelEmbedding(nn.Module):
    """Looks token ids up in a table whose rows are cut over the tensor-parallel group.

    Each rank answers for its own V/T rows and gives zero for the others; the sum over the group
    is the embedding.

    Args:
        padded_vocab_size: V.
        hidden_size: H.
        groups: groups of this rank.
        fused: whether to use the fused kernel for the gradient where it can run.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        groups: ParallelGroups,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.fused = fused
        self.weight = shard((padded_vocab_size, hidden_size), 0, groups.tp)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Maps int64 [S, B] to hidden states."""
        uses_kernel = self.fused and runs_kernels(self.weight)
        look_up = _LookUp.apply if uses_kernel else _look_up
        return leave_tensor_parallel(look_up(self.weight, tokens_SB, self.groups.tp), self.groups)


class PositionEmbedding(nn.Module):
    """A learned vector for each position; the table may be longer than the sequence."""

    def __init__(self, max_positions: int, hidden_size: int, groups: ParallelGroups) -> None:
        super().__init__()
        self.groups = groups
        self.weight = replica(
            (max_positions, hidden_size), groups.tp, sums_gradient=groups.sequence_parallel
        )

    def forward(self, length: int, positions_SB: Tensor | None = None) -> Tensor:
        """The rows to add to the hidden states of sequences.

        Args:
            length: S, of a whole sequence.
            positions_SB: of the tokens of whole sequences, int64 [S, B]; None: from 0 on in each.

        Returns:
            [S, 1, H], or [S, B, H] with positions; under sequence parallelism this rank's part of
            it along the first dimension.
        """
        if positions_SB is not None:
            return F.embedding(self._own_part(positions_SB), self.weight)
        return self._own_part(self.weight[:length]).unsqueeze(1)

    def _own_part(self, x: Tensor) -> Tensor:
        """What this rank adds of something that goes along the sequence."""
        if self.groups.sequence_parallel:
            return x.chunk(self.groups.tp.size)[self.groups.tp.rank]
        return x


class OutputLayer(nn.Module):
    """Projects hidden states to the local slice of the logits.

    Holds its own table unless the model ties it to the word embeddings, whose table is then
    passed to ``forward``.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        groups: ParallelGroups,
        *,
        own_weight: bool,
    ) -> None:
        super().__init__()
        self.groups = groups
        shape = (padded_vocab_size, hidden_size)
        self.weight = overwritable(shard(shape, 0, groups.tp)) if own_weight else None

    def forward(self, x_SBH: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Maps hidden states to local logits [S, B, V/T]."""
        weight = tied_weight if self.weight is None else self.weight
        assert isinstance(weight, torch.Tensor)
        return column_parallel(x_SBH, weight, None, self.groups)
