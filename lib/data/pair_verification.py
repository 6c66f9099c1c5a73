"""Every entry of an index and every token of a ``.bin``, checked: what opening leaves out."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lib.atomic import sha256_of
from lib.data.indexed_dataset import IndexedDataset, bin_path, byte_pointers, idx_path
from lib.errors import UserError

# Entries or tokens that are looked at in one go, so that memory stays flat.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PairContents:
    """What reading a pair wholly has shown.

    Attributes:
        bin_sha256: sha256 of the ``.bin``, in hexadecimal.
        idx_sha256: sha256 of the ``.idx``.
        token_counts: how often each id occurs, int64 [vocab_size].
    """

    bin_sha256: str
    idx_sha256: str
    token_counts: npt.NDArray[np.int64]


def verify_pair(
    pair: IndexedDataset, vocab_size: int, advance: Callable[[int], None] | None = None
) -> PairContents:
    """Reads a pair wholly, once, and checks it.

    Args:
        pair: the pair of files.
        vocab_size: tokens must be 0 to ``vocab_size`` - 1.
        advance: told the bytes of ``.bin`` that were read, for a progress bar.

    Raises:
        UserError: naming the file, where pointers are not the sums of the lengths, documents go
            backwards, or a token is outside the vocabulary.
    """
    verify_index(pair)
    counts = np.zeros(vocab_size, dtype=np.int64)
    digest = hashlib.sha256()
    for first in range(0, pair.num_tokens, _CHUNK):
        tokens = pair.tokens[first : first + _CHUNK]
        _verify_range(pair, first, vocab_size)
        counts += np.bincount(tokens, minlength=vocab_size)
        digest.update(tokens.data)
        if advance:
            advance(tokens.nbytes)
    return PairContents(digest.hexdigest(), sha256_of(idx_path(pair.prefix)), counts)


def verify_index(pair: IndexedDataset) -> None:
    """The part of ``verify_pair`` that reads the ``.idx`` alone, and raises as it does."""
    pair.expect_scan()
    _verify_sequences(pair)
    _verify_documents(pair)


def _verify_sequences(pair: IndexedDataset) -> None:
    start = 0
    for first in range(0, len(pair), _CHUNK):
        lengths = pair.sequence_lengths[first : first + _CHUNK].astype(np.int32)
        pointers = byte_pointers(lengths, pair.dtype.itemsize, start)
        found = pair.sequence_pointers[first : first + _CHUNK]
        # Other writers may leave sequences of length 0, which hold nothing and do no harm.
        if lengths.min() < 0 or not np.array_equal(pointers, found):
            raise UserError(
                f"{idx_path(pair.prefix)}: pointers and lengths disagree in sequences "
                f"{first} to {first + lengths.size - 1}; the file is damaged, write it again"
            )
        start = int(pointers[-1]) + int(lengths[-1]) * pair.dtype.itemsize


def _verify_documents(pair: IndexedDataset) -> None:
    for first in range(0, pair.num_documents, _CHUNK):
        if np.any(np.diff(pair.document_indices[first : first + _CHUNK + 1]) < 0):
            raise UserError(
                f"{idx_path(pair.prefix)}: documents are not in order near document {first}; "
                "the file is damaged, write it again"
            )


def _verify_range(pair: IndexedDataset, first: int, vocab_size: int) -> None:
    tokens = pair.tokens[first : first + _CHUNK]
    if tokens.min() >= 0 and tokens.max() < vocab_size:
        return
    position = first + int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    raise UserError(
        f"{bin_path(pair.prefix)}: token {int(pair.tokens[position])} at position {position:,} "
        f"(document {pair.document_at(position):,}) is not in the vocabulary, whose ids are 0 to "
        f"{vocab_size - 1}; another tokenizer made these tokens, or the file is damaged"
    )
