"""Samples: windows of a split's token stream.

A split is one stream of T tokens, document after document. Sample k is the S + 1 tokens from
k S on: S inputs and, one further, S labels; neighbours share one token, so every token but the
first is a label exactly once an epoch. There are W = (T - 1) // S samples; a remainder shorter
than a window is not read.
"""

import numpy as np

from lib.data.indexed_dataset import IndexedDataset
from lib.data.splits import SplitFacts


class SampleWindows:
    """The samples of one split, read from the memory map on demand.

    Args:
        dataset: the tokenised corpus.
        facts: which part of it the split is.
        seq_length: S.
    """

    def __init__(self, dataset: IndexedDataset, facts: SplitFacts, seq_length: int) -> None:
        self.seq_length = seq_length
        self.num_samples = facts.samples
        self._tokens = dataset.tokens[facts.first_token : facts.first_token + facts.tokens]

    def window(self, sample: int) -> np.ndarray:
        """Tokens of one sample, int64 [S + 1].

        Raises:
            IndexError: for a number outside [0, num_samples).
        """
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples}")
        start = sample * self.seq_length
        return self._tokens[start : start + self.seq_length + 1].astype(np.int64)

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of several samples, int64 [B, S + 1]; a negative number gives zeros."""
        rows = np.zeros((len(samples), self.seq_length + 1), dtype=np.int64)
        for row, sample in enumerate(samples):
            if sample >= 0:
                rows[row] = self.window(int(sample))
        return rows
