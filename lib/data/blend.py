"""Which corpus each sample of a blend comes from, by exact arithmetic in the sample's number.

Samples come in blocks of L. After b blocks corpus c has been drawn D_c(b) times: with the shares
w_c = weight / sum of weights and their running sums W_c,

    D_c(b) = floor(W_c b L) - floor(W_(c-1) b L),

which is floor or ceil of w_c b L and adds up to b L. It never falls from one block to the next
where w_c L >= 1, so L is the smallest power of two that gives this to every corpus: then
D_c(b + 1) >= floor(w_c b L + 1) >= ceil(w_c b L) >= D_c(b). Inside a block the corpora are placed
by a keyed permutation, and the draws of a corpus are numbered in order of their places.

L stays at or below 2^20. Corpora of a smaller share come first as one group, whose count
floor(W b L) never falls. A tree of two-way splits shares it out: of n draws of a node the left
child has q n to the nearest integer and the right child the rest, q being its share of the node,
so neither ever falls. A child that is split further has at most two thirds of its node. If the
node is less than 3/2 off its exact count then such a child is less than 2/3 * 3/2 + 1/2 = 3/2
off, and a single corpus less than 3/2 + 1/2 = 2.

A weight is the decimal number that it is written as (0.1 is one tenth); all else is integers.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lib.data.permutation import round_keys, shuffle

_SHORTEST_BLOCK = 1 << 10
_LONGEST_BLOCK = 1 << 20
_CACHED_BLOCKS = 4


class _Split(NamedTuple):
    """Of the draws of a node, share / total go to ``left`` and the rest to ``right``."""

    left: int
    right: int
    share: int
    total: int


class Blend:
    """The corpora of consecutive samples, numbered from 0.

    Args:
        weights: of each corpus; finite, not negative, at least one positive, any sum.
        key: names the permutations inside the blocks.

    Attributes:
        block: L.

    Raises:
        ValueError: for weights that are no weights.
    """

    def __init__(self, weights: Sequence[float], key: str) -> None:
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(f"weights {tuple(weights)}: each must be finite and not negative")
        if not any(weights):
            raise ValueError(f"weights {tuple(weights)}: at least one must be positive")
        exact = [Fraction(str(weight)) for weight in weights]
        unit = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * unit) for weight in exact]
        self._total = sum(self._weights)
        self._key = key
        drawn = [corpus for corpus, weight in enumerate(self._weights) if weight]
        self._alone = drawn[0] if len(drawn) == 1 else None
        self._large = [c for c in drawn if self._weights[c] * _LONGEST_BLOCK >= self._total]
        self._group = [c for c in drawn if self._weights[c] * _LONGEST_BLOCK < self._total]
        self._splits = _tree(self._weights, self._group)
        self.block = _SHORTEST_BLOCK
        while any(self._weights[c] * self.block < self._total for c in self._large):
            self.block *= 2
        self._placed = functools.lru_cache(_CACHED_BLOCKS)(self._place)

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first ``samples`` come from each corpus."""
        if self._alone is not None:
            return tuple(samples * (c == self._alone) for c in range(len(self._weights)))
        blocks, rest = divmod(samples, self.block)
        counts = self._counts_after(blocks)
        if rest:
            corpora = self._placed(blocks)[0][:rest]
            partial = np.bincount(corpora, minlength=len(counts)).tolist()
            counts = [whole + part for whole, part in zip(counts, partial, strict=True)]
        return tuple(counts)

    def draws(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples ``first`` to ``last - 1``.

        Returns:
            The corpus of each, and which draw of that corpus it is, counted from 0 where the
            blend begins: int64 [last - first] each.
        """
        if self._alone is not None:
            draws = np.arange(first, last, dtype=np.int64)
            return np.full_like(draws, self._alone), draws
        corpora = np.empty(last - first, dtype=np.int64)
        draws = np.empty_like(corpora)
        for block in range(first // self.block, -(-last // self.block)):
            start = block * self.block
            low, high = max(first, start), min(last, start + self.block)
            placed, drawn = self._placed(block)
            corpora[low - first : high - first] = placed[low - start : high - start]
            draws[low - first : high - first] = drawn[low - start : high - start]
        return corpora, draws

    def _counts_after(self, blocks: int) -> list[int]:
        samples = blocks * self.block
        counts = [0] * (len(self._weights) + len(self._splits))
        running = sum(self._weights[corpus] for corpus in self._group)
        before = running * samples // self._total
        if self._group:
            counts[len(self._weights) if self._splits else self._group[0]] = before
        for node, split in enumerate(self._splits, start=len(self._weights)):
            # Rounded to the nearest; halves up.
            left = (2 * split.share * counts[node] + split.total) // (2 * split.total)
            counts[split.left] = left
            counts[split.right] = counts[node] - left
        for corpus in self._large:
            running += self._weights[corpus]
            after = running * samples // self._total
            counts[corpus] = after - before
            before = after
        return counts[: len(self._weights)]

    def _place(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Corpus and draw of each sample of a block."""
        before = np.array(self._counts_after(block), dtype=np.int64)
        counts = np.array(self._counts_after(block + 1), dtype=np.int64) - before
        kinds = np.arange(len(counts), dtype=np.min_scalar_type(len(counts)))
        keys = round_keys(f"{self._key}/{block}")
        corpora = np.repeat(kinds, counts)[shuffle(self.block, keys)]
        draws = np.empty(self.block, dtype=np.int64)
        ahead = before - (np.cumsum(counts) - counts)
        places = np.argsort(corpora, kind="stable")
        draws[places] = np.arange(self.block, dtype=np.int64) + np.repeat(ahead, counts)
        return corpora, draws


def _tree(weights: Sequence[int], corpora: Sequence[int]) -> list[_Split]:
    """Splits, parents first, that share out the draws of ``corpora``.

    Nodes are numbered: corpora as they are, then the splits in their order, the root first.
    """
    largest_first = sorted(corpora, key=lambda corpus: (-weights[corpus], corpus))
    nodes = [largest_first] if len(largest_first) > 1 else []
    splits: list[_Split] = []
    for members in nodes:  # grows meanwhile
        total = sum(weights[corpus] for corpus in members)
        share, cut = 0, 0
        while 3 * share < total:
            share += weights[members[cut]]
            cut += 1
        children = []
        for part in (members[:cut], members[cut:]):
            if len(part) == 1:
                children.append(part[0])
            else:
                children.append(len(weights) + len(nodes))
                nodes.append(part)
        splits.append(_Split(children[0], children[1], share, total))
    return splits
