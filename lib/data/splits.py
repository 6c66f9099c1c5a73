"""Training, validation and test splits: contiguous ranges of documents, as Megatron cuts them.

``"90,5,5"`` (or ``"969,30,1"``) are weights; each split is [round(low * n), round(high * n)) of
the n documents, low and high being its cumulative share. (Megatron counts sequences, which are
documents unless its tool cut documents into sentences.)
"""

import contextlib
from dataclasses import dataclass

from lib.data.tokenized_corpus import TokenizedCorpus
from lib.errors import UserError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class SplitFacts:
    """What a split holds.

    Attributes:
        documents: first document and the one after the last.
        first_token: position of its first token in the corpus.
        tokens: number of its tokens T.
        samples: windows of ``seq_length`` it gives, (T - 1) // seq_length, at least 0.
    """

    documents: tuple[int, int]
    first_token: int
    tokens: int
    samples: int


def parse_split(text: str) -> tuple[float, float, float]:
    """Reads three weights separated by commas; missing ones at the end are 0.

    Raises:
        UserError: for anything but one to three finite, non-negative numbers with a positive sum.
    """
    weights: list[float] = []
    with contextlib.suppress(ValueError):
        weights = [float(part) for part in text.split(",")]
    weights += [0.0] * (3 - len(weights)) if weights else []
    total = sum(weights)
    if len(weights) != 3 or not 0 < total < float("inf") or min(weights) < 0:
        raise UserError(
            f"training.split = {text!r}: not one to three non-negative weights for train, "
            'valid and test; write something like "90,5,5"'
        )
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_documents(
    weights: tuple[float, float, float], documents: int
) -> dict[str, tuple[int, int]]:
    """Document ranges [first, last) of each split."""
    bounds = [0.0]
    for weight in weights:
        bounds.append(bounds[-1] + weight)
    edges = [round(bound * documents) for bound in bounds]
    return {name: (edges[i], edges[i + 1]) for i, name in enumerate(SPLITS)}


def describe_splits(corpus: TokenizedCorpus, split: str, seq_length: int) -> dict[str, SplitFacts]:
    """Counts documents, tokens and samples of each split of a tokenised corpus."""
    ranges = split_documents(parse_split(split), corpus.num_documents)
    return {name: _facts_of(corpus, documents, seq_length) for name, documents in ranges.items()}


def whole_split(corpus: TokenizedCorpus, seq_length: int) -> SplitFacts:
    """The facts of all documents taken as one split, as of a corpus that is a validation set."""
    return _facts_of(corpus, (0, corpus.num_documents), seq_length)


def _facts_of(corpus: TokenizedCorpus, documents: tuple[int, int], seq_length: int) -> SplitFacts:
    start, end = (corpus.document_start(document) for document in documents)
    tokens = end - start
    return SplitFacts(documents, start, tokens, max(0, (tokens - 1) // seq_length))
