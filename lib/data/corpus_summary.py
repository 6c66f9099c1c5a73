"""What a tokenised corpus is like: lengths of its documents, equal documents, unknown tokens.

All of it is read from the index in pieces, in flat memory. Tokens are read only where two
neighbours are of the same length, and, for unknown tokens, where the tokenizer has one.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokenizer import TextTokenizer

# Documents, or tokens, that are looked at in one go.
_CHUNK = 1 << 16
_MOST_TOKENS = 1 << 20
# Where the bins of the histogram begin: 1, 2, 4 and so on, and 0 before them.
_EDGES = np.left_shift(1, np.arange(62, dtype=np.int64))


@dataclass
class LengthHistogram:
    """How long documents are, in bins that each reach to twice the one before.

    Attributes:
        documents: documents of each bin, int64 [63]: without tokens, of 1, of 2 or 3, of 4 to 7.
        tokens: tokens of the documents of each bin, int64 [63].
        shortest: tokens of the shortest document; 0 where there is none.
        longest: tokens of the longest.
    """

    documents: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(63, dtype=np.int64))
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(63, dtype=np.int64))
    shortest: int = 0
    longest: int = 0

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Counts documents of these lengths, at least one."""
        first = not self.documents.any()
        place = np.searchsorted(_EDGES, lengths, side="right")
        self.documents += np.bincount(place, minlength=63)
        # Summed as integers: weights of bincount are floats, exact up to 2^53 only.
        np.add.at(self.tokens, place, lengths)
        least = int(lengths.min())
        self.shortest = least if first else min(self.shortest, least)
        self.longest = max(self.longest, int(lengths.max()))

    def bins(self) -> list[tuple[int, int, int, int]]:
        """First and last length, documents and tokens of each bin up to the last that holds any."""
        used = np.flatnonzero(self.documents)
        if not used.size:
            return []
        return [
            (
                int(_EDGES[bin - 1]) if bin else 0,
                2 * int(_EDGES[bin - 1]) - 1 if bin else 0,
                int(self.documents[bin]),
                int(self.tokens[bin]),
            )
            for bin in range(int(used[0]), int(used[-1]) + 1)
        ]


@dataclass
class CorpusSummary:
    """What a look at all documents shows.

    Attributes:
        lengths: of the documents, in tokens.
        duplicates: documents that are equal to the one before them; None if that was not counted.
    """

    lengths: LengthHistogram = field(default_factory=LengthHistogram)
    duplicates: int | None = None


def summarise(
    corpus: TokenizedCorpus, advance: Callable[[int], None] | None = None
) -> CorpusSummary:
    """Looks at all documents of a corpus.

    Exact duplicates are neighbours in a corpus made here, since a raw corpus is ordered by a hash
    of its texts. In a pair made elsewhere they may be anywhere and are not counted.

    Args:
        corpus: the corpus.
        advance: told the documents that were looked at, for a progress bar.
    """
    summary = CorpusSummary()
    if corpus.manifest.corpus_sha256 is not None:
        summary.duplicates = 0
    previous = -1
    for start, lengths in _lengths(corpus):
        summary.lengths.add(lengths)
        if summary.duplicates is not None:
            summary.duplicates += _equal_neighbours(corpus, start, lengths, previous)
        previous = int(lengths[-1])
        if advance:
            advance(lengths.size)
    return summary


def _lengths(corpus: TokenizedCorpus) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """The documents in pieces: position of the first token, and the tokens of each document."""
    start = 0
    for pair in corpus.parts:
        pair.expect_scan()
        for first in range(0, pair.num_documents, _CHUNK):
            last = min(first + _CHUNK, pair.num_documents)
            lengths = np.diff(pair.document_edges(first, last))
            yield start, lengths
            start += int(lengths.sum())


def _equal_neighbours(
    corpus: TokenizedCorpus, start: int, lengths: npt.NDArray[np.int64], previous: int
) -> int:
    """How many of these documents equal the one before; ``previous`` is the first one's length."""
    before = np.append(previous, lengths[:-1])
    starts = start + np.cumsum(lengths) - lengths
    same = np.flatnonzero((before == lengths) & (lengths > 0))
    return sum(_is_repeated(corpus, int(starts[i]), int(lengths[i])) for i in same)


def _is_repeated(corpus: TokenizedCorpus, start: int, length: int) -> bool:
    """Whether the ``length`` tokens from ``start`` on equal those before them."""
    for first in range(start, start + length, _MOST_TOKENS):
        last = min(first + _MOST_TOKENS, start + length)
        if not np.array_equal(corpus.read(first, last), corpus.read(first - length, last - length)):
            return False
    return True


def unknown_token(tokenizer: TextTokenizer) -> int | None:
    """The token that stands for text that a tokenizer cannot write; None where it has none.

    Byte-level tokenizers have none. One that is the end of documents too is taken for none, since
    the two cannot be told apart.
    """
    model = json.loads(tokenizer.backend.to_str())["model"]
    spelling, number = model.get("unk_token"), model.get("unk_id")
    if spelling:
        number = tokenizer.backend.token_to_id(spelling)
    return None if number == tokenizer.eod_id else number


def count_token(
    corpus: TokenizedCorpus, token: int, advance: Callable[[int], None] | None = None
) -> int:
    """How often a token occurs; reads all tokens and tells ``advance`` how many it has read."""
    total = 0
    for pair in corpus.parts:
        for first in range(0, pair.num_tokens, _MOST_TOKENS):
            tokens = pair.tokens[first : first + _MOST_TOKENS]
            total += int(np.count_nonzero(tokens == token))
            if advance:
                advance(tokens.size)
    return total
