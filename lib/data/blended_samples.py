"""The samples of a run by their positions, whichever corpus each comes from."""

from collections.abc import Sequence

import numpy as np

from lib.data.order import Drawn, SampleOrder
from lib.data.samples import SampleWindows


class BlendedSamples:
    """The samples at global positions.

    A negative position is a filler: zeros in which no document begins.

    Args:
        windows: for each segment of the order, the samples of each of its corpora.
        order: what is read where.

    Raises:
        ValueError: the samples are not those that the order was made for.
    """

    def __init__(self, windows: Sequence[Sequence[SampleWindows]], order: SampleOrder) -> None:
        for corpora, segment in zip(windows, order.segments, strict=True):
            counts = tuple(corpus.num_samples for corpus in corpora)
            if counts != segment.num_samples:
                raise ValueError(f"there are {counts} samples, not {segment.num_samples}")
        self.order = order
        self._windows = windows

    def drawn(self, positions: np.ndarray) -> Drawn:
        """Corpus and sample at each position, int64 of their shape; -1 for a filler."""
        found = self.order.samples_at(np.maximum(positions, 0))
        filler = positions < 0
        return Drawn(np.where(filler, -1, found.corpus), np.where(filler, -1, found.sample))

    def windows_at(self, positions: np.ndarray) -> np.ndarray:
        """Tokens of the samples at positions [B] of one segment, int64 [B, S + 1]."""
        corpora, drawn = self._find(positions)
        rows = np.zeros((len(positions), corpora[0].seq_length + 1), dtype=np.int64)
        for row, (corpus, sample) in enumerate(drawn):
            if sample >= 0:
                rows[row] = corpora[corpus].window(sample)
        return rows

    def starts_at(self, positions: np.ndarray) -> list[np.ndarray]:
        """Where documents begin in the samples at positions [B] of one segment.

        Returns:
            For each sample int64 places in its S + 1 tokens, 1 to S.
        """
        corpora, drawn = self._find(positions)
        none = np.empty(0, dtype=np.int64)
        return [corpora[c].starts(sample) if sample >= 0 else none for c, sample in drawn]

    def _find(self, positions: np.ndarray) -> tuple[Sequence[SampleWindows], list[tuple[int, int]]]:
        """The corpora of the positions' segment, and corpus and sample at each."""
        real = positions[positions >= 0]
        segment = self.order.segment_at(int(real.min())) if len(real) else 0
        if len(real) and self.order.segment_at(int(real.max())) != segment:
            raise ValueError(f"positions {real.min()} to {real.max()} are in several segments")
        found = self.drawn(positions)
        pairs = zip(found.corpus.tolist(), found.sample.tolist(), strict=True)
        return self._windows[segment], list(pairs)
