"""Samples: windows of a split's token stream.

A split is one stream of T tokens, document after document. Sample k is the S + 1 tokens from
k S on: S inputs and, one further, S labels; neighbours share one token, so every token but the
first is a label exactly once an epoch. There are W = (T - 1) // S samples; a remainder shorter
than a window is not read.
"""

import numpy as np
import numpy.typing as npt

from lib.data.splits import SplitFacts
from lib.data.tokenized_corpus import TokenizedCorpus


class SampleWindows:
    """The samples of one split, read on demand.

    Args:
        corpus: the tokenised corpus.
        facts: which part of it the split is.
        seq_length: S.
    """

    def __init__(self, corpus: TokenizedCorpus, facts: SplitFacts, seq_length: int) -> None:
        self.seq_length = seq_length
        self.num_samples = facts.samples
        self._corpus = corpus
        self._first_token = facts.first_token

    def window(self, sample: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, int64 [S + 1].

        Raises:
            IndexError: for a number outside [0, num_samples).
        """
        start = self.position(sample)
        return self._corpus.read(start, start + self.seq_length + 1)

    def windows(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of several samples, int64 [B, S + 1]; a negative number gives zeros."""
        rows = np.zeros((len(samples), self.seq_length + 1), dtype=np.int64)
        for row, sample in enumerate(samples):
            if sample >= 0:
                rows[row] = self.window(int(sample))
        return rows

    def starts(self, sample: int) -> npt.NDArray[np.int64]:
        """Where documents begin in a window: int64, rising, each in 1 to S.

        The document in which the window itself begins has no entry. The index tells, whatever
        the tokens are.

        Raises:
            IndexError: for a number outside [0, num_samples).
        """
        start = self.position(sample)
        return self._corpus.document_starts(start, start + self.seq_length + 1) - start

    def position(self, sample: int) -> int:
        """Position in the corpus of a sample's first token.

        Raises:
            IndexError: for a number outside [0, num_samples).
        """
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples}")
        return self._first_token + sample * self.seq_length
