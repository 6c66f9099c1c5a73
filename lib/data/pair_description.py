"""The manifest of a pair of token files that was made elsewhere.

Megatron's files say nothing of the tokenizer that made them. What the files can tell is read from
them, all of it, so that the checksums and counts are true; the rest the user must know.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lib.data.indexed_dataset import IndexedDataset, idx_path
from lib.data.pair_verification import verify_pair
from lib.data.tokens_manifest import TokensManifest, TokensPart
from lib.errors import UserError

# Documents whose ends are looked at in one go.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class PairTokenizer:
    """The tokenizer that made a pair.

    Attributes:
        fingerprint: its fingerprint.
        eod_id: id of the token that ends a document.
        byte_lengths: UTF-8 bytes that each id stands for, [vocab_size].
    """

    fingerprint: str
    eod_id: int
    byte_lengths: npt.NDArray[np.int32]


@dataclass(frozen=True)
class DocumentEnds:
    """How the documents of a pair end.

    Attributes:
        documents: documents that have tokens.
        ended: those of them whose last token is the one asked for.
        first_other: number of the first one with another last token; None if there is none.
    """

    documents: int
    ended: int
    first_other: int | None


def describe_pair(
    pair: IndexedDataset,
    tokenizer: PairTokenizer,
    *,
    append_eod: bool,
    advance: Callable[[int], None] | None = None,
) -> TokensManifest:
    """Reads a pair wholly, checks it, and describes it: a manifest of one part.

    Args:
        pair: the pair of files.
        tokenizer: what made its tokens.
        append_eod: whether the end-of-document token follows each document.
        advance: told the bytes of ``.bin`` that were read, for a progress bar.

    Raises:
        UserError: where the pair is damaged, a token is not in the tokenizer's vocabulary, or a
            document does not end as ``append_eod`` says.
    """
    vocab_size = len(tokenizer.byte_lengths)
    contents = verify_pair(pair, vocab_size, advance)
    ends = document_ends(pair, tokenizer.eod_id)
    if append_eod and ends.first_other is not None:
        raise UserError(
            f"{idx_path(pair.prefix)}: document {ends.first_other:,} does not end with token "
            f"{tokenizer.eod_id}, which ends a document in this tokenizer "
            f"({ends.ended:,} of {ends.documents:,} do); say --no-append-eod, or name the "
            "tokenizer that made these tokens"
        )
    return TokensManifest(
        parts=(
            TokensPart(
                prefix=pair.prefix.name,
                documents=pair.num_documents,
                tokens=pair.num_tokens,
                bin_sha256=contents.bin_sha256,
                idx_sha256=contents.idx_sha256,
            ),
        ),
        dtype=pair.dtype.name,
        documents=pair.num_documents,
        sequences=len(pair),
        tokens=pair.num_tokens,
        text_bytes=int((contents.token_counts * tokenizer.byte_lengths).sum()),
        append_eod=append_eod,
        vocab_size=vocab_size,
        eod_id=tokenizer.eod_id,
        tokenizer_fingerprint=tokenizer.fingerprint,
        corpus_sha256=None,
    )


def document_ends(pair: IndexedDataset, token: int) -> DocumentEnds:
    """Counts the documents whose last token is ``token``; those without tokens do not count."""
    documents = ended = 0
    first_other: int | None = None
    for first in range(0, pair.num_documents, _CHUNK):
        edges = pair.document_edges(first, min(first + _CHUNK, pair.num_documents))
        filled = np.flatnonzero(np.diff(edges))
        right = pair.tokens[edges[filled + 1] - 1] == token
        documents += filled.size
        ended += int(right.sum())
        if first_other is None and not right.all():
            first_other = first + int(filled[np.flatnonzero(~right)[0]])
    return DocumentEnds(documents, ended, first_other)
