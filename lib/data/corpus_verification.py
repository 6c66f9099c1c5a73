"""All of a tokenised corpus, held against its manifest: files, counts, and what was left out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib.data.provenance import raw_manifest_of
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokens_manifest import LEFT_OUT_FILE, read_left_out
from lib.errors import UserError

# Numbers that are looked at in one go, so that memory stays flat.
_CHUNK = 1 << 20


def verify_corpus(
    corpus: TokenizedCorpus, manifest: Path, raw: Path, advance: Callable[[int], None] | None = None
) -> None:
    """Reads every byte of a corpus and checks it.

    Args:
        corpus: the corpus.
        manifest: the path that it was opened by.
        raw: where its raw corpus should be; its counts are compared if it is there.
        advance: told the bytes that were read, for a progress bar.

    Raises:
        UserError: naming the file, where it is not what the manifest says.
    """
    corpus.verify(advance)
    described = corpus.manifest
    counts = {
        "documents": (described.documents, corpus.num_documents),
        "sequences": (described.sequences, sum(len(pair) for pair in corpus.parts)),
        "tokens": (described.tokens, corpus.num_tokens),
    }
    for name, (said, found) in counts.items():
        if said != found:
            raise UserError(
                f"{manifest}: {said:,} {name}, but its parts have {found:,}; make it again"
            )
    if described.corpus_sha256 is not None:
        _verify_left_out(corpus, manifest, raw)


def _verify_left_out(corpus: TokenizedCorpus, manifest: Path, raw: Path) -> None:
    """The raw documents that gave no tokens: as many as were counted, and all of that corpus."""
    path, numbers, described = (
        manifest.parent / LEFT_OUT_FILE,
        read_left_out(manifest),
        corpus.manifest,
    )
    said = described.empty_documents + described.short_documents + described.dropped_documents
    if numbers.shape != (said,) or not _is_increasing(numbers):
        raise UserError(
            f"{path}: must have {said:,} increasing numbers, as {manifest} counts documents left "
            f"out, but has {numbers.size:,}; run tokenize_corpus again"
        )
    documents = said + described.documents
    if said and not (numbers[0] >= 0 and numbers[-1] < documents):
        raise UserError(
            f"{path}: its numbers must be 0 to {documents - 1}; run tokenize_corpus again"
        )
    from_raw = raw_manifest_of(corpus, raw)
    if from_raw is not None and from_raw.documents != documents:
        raise UserError(
            f"{manifest}: {described.documents:,} documents and {said:,} left out, but {raw} has "
            f"{from_raw.documents:,}; run tokenize_corpus again"
        )


def _is_increasing(numbers: npt.NDArray[np.int64]) -> bool:
    return all(
        bool(np.all(np.diff(numbers[first : first + _CHUNK + 1]) > 0))
        for first in range(0, numbers.size, _CHUNK)
    )
