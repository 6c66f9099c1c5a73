"""Dropout whose masks fit the layout.

Activations that every tensor-parallel rank holds whole need one mask on all ranks: they draw from
the default stream, which is seeded alike. Activations that are cut over the ranks need another
mask on each: they draw from the rank's own stream. See ``lib.parallel.random``.
"""

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

from lib.parallel.groups import ParallelGroups


class Dropout(nn.Module):
    """Zeroes elements with a probability and scales the others to keep the mean, in training.

    Args:
        probability: of an element to become zero; with 0, and in evaluation, nothing is drawn.
        groups: groups of this rank.
        cut: whether the tensor-parallel ranks hold other parts of the activation.
    """

    def __init__(self, probability: float, groups: ParallelGroups, *, cut: bool) -> None:
        super().__init__()
        self.probability = probability
        self.draws_alone = cut and groups.tp.size > 1
        self.stream = groups.shard_stream if self.draws_alone else None

    @classmethod
    def of_hidden(cls, probability: float, groups: ParallelGroups) -> "Dropout":
        """For activations between layers: cut under sequence parallelism, else whole."""
        return cls(probability, groups, cut=groups.sequence_parallel)

    @classmethod
    def of_heads(cls, probability: float, groups: ParallelGroups) -> "Dropout":
        """For attention weights: each rank has its own heads."""
        return cls(probability, groups, cut=True)

    @contextmanager
    def drawing(self) -> Generator[float]:
        """Inside, random numbers come from the right stream.

        Yields:
            The probability to use, 0 in evaluation: for functions that drop elements themselves.
        """
        probability = self.probability if self.training else 0.0
        if probability == 0.0 or not self.draws_alone:
            yield probability
            return
        assert self.stream is not None
        with self.stream.active():
            yield probability

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements of a tensor of any shape."""
        with self.drawing() as probability:
            return x if probability == 0.0 else F.dropout(x, probability)
