"""Token embedding cut over the vocabulary, learned positions, and the output projection.

Shape legend: S sequence, B batch, H hidden, V padded vocabulary, T tensor-parallel degree.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.parallel.collectives import copy_to_group, reduce_from_group
from lib.parallel.groups import Group
from lib.parallel.storage import local, replica, shard


class VocabParallelEmbedding(nn.Module):
    """Looks token ids up in a table whose rows are cut over the group.

    Each rank answers for its own V/T rows and gives zero for the others; the sum over the group
    is the embedding.
    """

    def __init__(self, padded_vocab_size: int, hidden_size: int, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = shard((padded_vocab_size, hidden_size), 0, group)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Maps int64 [S, B] to [S, B, H]."""
        weight = local(self.weight)
        rows = weight.shape[0]
        index_SB = tokens_SB - self.group.rank * rows
        outside_SB = (index_SB < 0) | (index_SB >= rows)
        x_SBH = F.embedding(index_SB.masked_fill(outside_SB, 0), weight)
        x_SBH = x_SBH.masked_fill(outside_SB.unsqueeze(-1), 0.0)
        return reduce_from_group(x_SBH, self.group)


class PositionEmbedding(nn.Module):
    """A learned vector for each position; the table may be longer than the sequence."""

    def __init__(self, max_positions: int, hidden_size: int, group: Group) -> None:
        super().__init__()
        self.weight = replica((max_positions, hidden_size), group)

    def forward(self, length: int) -> Tensor:
        """The first ``length`` rows as [S, 1, H]."""
        return local(self.weight)[:length].unsqueeze(1)


class OutputLayer(nn.Module):
    """Projects hidden states to the local slice of the logits.

    Holds its own table unless the model ties it to the word embeddings, whose table is then
    passed to ``forward``.
    """

    def __init__(
        self, padded_vocab_size: int, hidden_size: int, group: Group, *, own_weight: bool
    ) -> None:
        super().__init__()
        self.group = group
        self.weight = shard((padded_vocab_size, hidden_size), 0, group) if own_weight else None

    def forward(self, x_SBH: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Maps [S, B, H] to local logits [S, B, V/T]."""
        weight = tied_weight if self.weight is None else self.weight
        assert isinstance(weight, torch.Tensor)
        return F.linear(copy_to_group(x_SBH, self.group), local(weight))
