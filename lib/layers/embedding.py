"""Token embedding cut over the vocabulary, learned positions, and the output projection.

Shape legend: S sequence, B batch, H hidden, V padded vocabulary, T tensor-parallel degree. Hidden
states are [S, B, H], or [S/T, B, H] under sequence parallelism.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.layers.linear import column_parallel
from lib.parallel.collectives import leave_tensor_parallel, sum_partial_gradient
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import local, replica, shard


class VocabParallelEmbedding(nn.Module):
    """Looks token ids up in a table whose rows are cut over the tensor-parallel group.

    Each rank answers for its own V/T rows and gives zero for the others; the sum over the group
    is the embedding.
    """

    def __init__(self, padded_vocab_size: int, hidden_size: int, groups: ParallelGroups) -> None:
        super().__init__()
        self.groups = groups
        self.weight = shard((padded_vocab_size, hidden_size), 0, groups.tp)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Maps int64 [S, B] to hidden states."""
        weight = local(self.weight)
        rows = weight.shape[0]
        index_SB = tokens_SB - self.groups.tp.rank * rows
        outside_SB = (index_SB < 0) | (index_SB >= rows)
        x_SBH = F.embedding(index_SB.masked_fill(outside_SB, 0), weight)
        x_SBH = x_SBH.masked_fill(outside_SB.unsqueeze(-1), 0.0)
        return leave_tensor_parallel(x_SBH, self.groups)


class PositionEmbedding(nn.Module):
    """A learned vector for each position; the table may be longer than the sequence."""

    def __init__(self, max_positions: int, hidden_size: int, groups: ParallelGroups) -> None:
        super().__init__()
        self.groups = groups
        self.weight = replica((max_positions, hidden_size), groups.tp)

    def forward(self, length: int, positions_SB: Tensor | None = None) -> Tensor:
        """The rows to add to the hidden states of sequences.

        Args:
            length: S, of a whole sequence.
            positions_SB: of the tokens of whole sequences, int64 [S, B]; None: from 0 on in each.

        Returns:
            [S, 1, H], or [S, B, H] with positions; under sequence parallelism this rank's part of
            it along the first dimension.
        """
        rows = sum_partial_gradient(local(self.weight), self.groups)
        if positions_SB is not None:
            return F.embedding(self._own_part(positions_SB), rows)
        return self._own_part(rows[:length]).unsqueeze(1)

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
        self.weight = shard(shape, 0, groups.tp) if own_weight else None

    def forward(self, x_SBH: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Maps hidden states to local logits [S, B, V/T]."""
        weight = tied_weight if self.weight is None else self.weight
        assert isinstance(weight, torch.Tensor)
        return column_parallel(x_SBH, (local(weight),), (None,), self.groups)[0]
