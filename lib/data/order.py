"""The order in which samples are read, by arithmetic: no index files, no state but one integer.

Positions 0, 1, 2, ... are the samples of a run in the order of their use, whatever the layout.
``lib.data.blend`` says which corpus position p is read from and which draw of that corpus it is.
Draw k is sample ``permutation_e(k mod W)`` of epoch ``e = k div W``, W being the number of
samples of the corpus, and the permutation one of ``lib.data.permutation``, keyed by seed, purpose,
corpus and epoch. Of a single corpus position p is draw p.

A run is one segment after another; each has weights and a sequence length of its own. The draws of
a corpus carry on from one segment to the next, so that no sample is lost or comes again, as long
as the sequence length stays. A new length cuts the corpora into other samples: a new pass begins,
with draw 0 and other keys. A segment that changes neither goes on with the one before it.

Memory and start-up cost do not depend on the size of the corpora, and a longer run or a further
segment keeps the order of what was read.
"""

import functools
import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np

from lib.data.blend import Blend
from lib.data.permutation import permute, round_keys

_PAGE = 4096  # positions whose samples are found at once: numpy is slow on a few
_CACHED_PAGES = 16


class PhaseFacts(Protocol):
    """What the order must know of one phase of a run (``Phase`` of the run configuration)."""

    @property
    def from_samples(self) -> int:
        """The position at which the phase begins."""
        ...

    @property
    def seq_length(self) -> int:
        """S of its samples."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of the corpora by name; a corpus that is not named has none."""
        ...

    @property
    def samples(self) -> Mapping[str, int]:
        """W of each of them at this sequence length."""
        ...


@dataclass(frozen=True)
class Segment:
    """A part of a run.

    Attributes:
        start: its first position.
        weights: of each corpus, as ``lib.data.blend`` wants them.
        num_samples: W of each corpus at this sequence length.
        seq_length: S.
    """

    start: int
    weights: tuple[float, ...]
    num_samples: tuple[int, ...]
    seq_length: int


class Drawn(NamedTuple):
    """What is read at some positions; int64 arrays of their shape.

    Attributes:
        corpus: number of the corpus, by ``SampleOrder.names``.
        sample: number of the sample in that corpus's split.
    """

    corpus: np.ndarray
    sample: np.ndarray


@dataclass(frozen=True)
class _Part:
    """A segment with what came before it, or several that differ in nothing that matters here.

    Attributes:
        start: its first position.
        blend: of its weights.
        sizes: W of each corpus, int64 [C]; 1 where it has none, which is then never drawn.
        carried: draws of each corpus in this pass before the segment, int64 [C].
        drawn: draws of each corpus in the run before the segment.
        key: what the keys of the corpora's permutations end with in this pass.
    """

    start: int
    blend: Blend
    sizes: np.ndarray
    carried: np.ndarray
    drawn: tuple[int, ...]
    key: str


class SampleOrder:
    """The order of a run's samples.

    A corpus that the run begins with alone has the order of a run of that corpus alone, whatever
    its name. The name of any other is in its keys, so that corpora of one size differ.

    Args:
        segments: the first begins at 0, each later one after the one before it.
        seed: ``training.seed``.
        names: of the corpora.
        purpose: ``train`` or ``valid``; different purposes have unrelated orders.

    Raises:
        ValueError: for segments that are no order.
    """

    def __init__(
        self, segments: Sequence[Segment], seed: int, names: Sequence[str], purpose: str = "train"
    ) -> None:
        self.segments = tuple(segments)
        self.names = tuple(names)
        self._seed = seed
        self._purpose = purpose
        _check(self.segments, self.names)
        self._starts = [segment.start for segment in self.segments]
        drawn = [name for name, w in zip(self.names, self.segments[0].weights, strict=True) if w]
        self._unnamed = drawn[0] if len(drawn) == 1 else None
        self._parts = self._follow()
        self._page = functools.lru_cache(_CACHED_PAGES)(self._read_page)

    @classmethod
    def of_one(cls, num_samples: int, seed: int, name: str, purpose: str = "train") -> Self:
        """The order of a single corpus that has ``num_samples`` samples."""
        return cls([Segment(0, (1.0,), (num_samples,), 0)], seed, [name], purpose)

    @classmethod
    def of_phases(cls, phases: Sequence[PhaseFacts], seed: int) -> Self:
        """The order of a training run.

        ``names`` come out sorted, so that the order does not depend on theirs in a file.
        """
        names = sorted({name for phase in phases for name in phase.weights})
        segments = [
            Segment(
                phase.from_samples,
                tuple(phase.weights.get(name, 0) for name in names),
                tuple(phase.samples.get(name, 0) for name in names),
                phase.seq_length,
            )
            for phase in phases
        ]
        return cls(segments, seed, names)

    def segment_at(self, position: int) -> int:
        """The number of the segment that a position is in."""
        return bisect_right(self._starts, position) - 1

    def draws_before(self, position: int) -> tuple[int, ...]:
        """How many of the run's samples before a position come from each corpus."""
        part = self._parts[self.segment_at(position)]
        counts = part.blend.counts(position - part.start)
        return _sums(part.drawn, counts)

    def samples_at(self, positions: np.ndarray) -> Drawn:
        """What is read at global positions (integers of any shape, not negative)."""
        flat = positions.reshape(-1).astype(np.int64)
        found = Drawn(np.empty_like(flat), np.empty_like(flat))
        pages = flat // _PAGE
        for number in np.unique(pages).tolist():
            here = pages == number
            page = self._page(number)
            found.corpus[here] = page.corpus[flat[here] - number * _PAGE]
            found.sample[here] = page.sample[flat[here] - number * _PAGE]
        return Drawn(found.corpus.reshape(positions.shape), found.sample.reshape(positions.shape))

    def _follow(self) -> list[_Part]:
        """The segments, each with what the ones before it drew."""
        parts: list[_Part] = []
        passes = 0
        for before, segment in zip([None, *self.segments], self.segments, strict=False):
            if before is None:
                drawn = carried = (0,) * len(self.names)
            elif (before.weights, before.seq_length) == (segment.weights, segment.seq_length):
                parts.append(parts[-1])
                continue
            else:
                counts = parts[-1].blend.counts(segment.start - parts[-1].start)
                drawn = _sums(parts[-1].drawn, counts)
                carried = _sums(parts[-1].carried.tolist(), counts)
                if before.seq_length != segment.seq_length:
                    carried = (0,) * len(self.names)
                    passes += 1
            part = _Part(
                segment.start,
                Blend(segment.weights, f"blend/{self._purpose}/{self._seed}/{segment.start}"),
                np.maximum(np.array(segment.num_samples, dtype=np.int64), 1),
                np.array(carried, dtype=np.int64),
                drawn,
                f"/pass {passes}" if passes else "",
            )
            parts.append(part)
        return parts

    def _read_page(self, number: int) -> Drawn:
        """What is read at the positions of one page."""
        first, last = number * _PAGE, (number + 1) * _PAGE
        page = Drawn(np.empty(_PAGE, dtype=np.int64), np.empty(_PAGE, dtype=np.int64))
        for part, end in zip(self._parts, [*self._starts[1:], last], strict=True):
            low, high = max(first, part.start), min(last, end)
            if low < high:
                corpora, draws = part.blend.draws(low - part.start, high - part.start)
                page.corpus[low - first : high - first] = corpora
                page.sample[low - first : high - first] = self._samples(part, corpora, draws)
        return page

    def _samples(self, part: _Part, corpora: np.ndarray, draws: np.ndarray) -> np.ndarray:
        sizes = part.sizes[corpora]
        epochs, numbers = np.divmod(draws + part.carried[corpora], sizes)
        pairs = list(zip(corpora.tolist(), epochs.tolist(), strict=True))
        place_of = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        keys = np.stack([self._keys(part, *pair) for pair in place_of], axis=1)
        return permute(numbers, sizes, keys[:, [place_of[pair] for pair in pairs]])

    def _keys(self, part: _Part, corpus: int, epoch: int) -> np.ndarray:
        name = self.names[corpus]
        suffix = "" if name == self._unnamed else f"/{name}"
        text = f"sample order/{self._purpose}/{self._seed}/{epoch}{suffix}{part.key}"
        return round_keys(text)


def _sums(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _check(segments: Sequence[Segment], names: Sequence[str]) -> None:
    if not segments or segments[0].start != 0:
        raise ValueError("the first segment must begin at 0")
    for before, after in itertools.pairwise(segments):
        if after.start <= before.start:
            raise ValueError(f"a segment at {after.start} cannot follow one at {before.start}")
    seq_length, sizes = segments[0].seq_length, dict[str, int]()
    for segment in segments:
        if segment.seq_length != seq_length:
            seq_length, sizes = segment.seq_length, dict[str, int]()
        for name, weight, size in zip(names, segment.weights, segment.num_samples, strict=True):
            if weight > 0 and size < 1:
                raise ValueError(f"{name} has a weight of {weight} but no sample")
            if weight > 0 and sizes.setdefault(name, size) != size:
                raise ValueError(f"{name} has {size} samples here and {sizes[name]} before")


def step_positions(
    consumed_samples: int, *, micro_batches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> np.ndarray:
    """Global positions that one data-parallel rank reads in one step.

    Micro batch m of all ranks together covers consecutive positions; rank d takes the d-th slice
    of them. Any layout reads the same set in the same step.

    Returns:
        int64 [micro_batches, micro_batch_size].
    """
    start = consumed_samples + dp_rank * micro_batch_size
    first = start + np.arange(micro_batches, dtype=np.int64) * (micro_batch_size * dp_size)
    return first[:, None] + np.arange(micro_batch_size, dtype=np.int64)[None, :]
