"""Small tokenised corpora of given documents, for tests."""

from pathlib import Path

import numpy as np

from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from lib.data.pair_description import PairTokenizer, describe_pair
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokens_manifest import MANIFEST_FILE, TOKENS_PREFIX, TokensManifest

EOD_ID = 0


def write_pair(prefix: Path, documents, dtype=np.uint16) -> IndexedDataset:
    """A pair of files; a document is its tokens, an empty one leaves a boundary alone."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.asarray(document, dtype=np.int64))
    return IndexedDataset(prefix)


def describe(pair: IndexedDataset, vocab_size: int, fingerprint="tiny") -> TokensManifest:
    tokenizer = PairTokenizer(fingerprint, EOD_ID, np.ones(vocab_size, dtype=np.int32))
    return describe_pair(pair, tokenizer, append_eod=False)


def write_corpus(
    folder: Path, documents, *, dtype=np.uint16, vocab_size=65_536, parts=1, fingerprint="tiny"
) -> Path:
    """A corpus in ``folder``, in as many parts as asked for; gives its manifest's path."""
    documents, described = list(documents), []
    edges = [len(documents) * part // parts for part in range(parts + 1)]
    for part in range(parts):
        name = TOKENS_PREFIX + (f"_{part:02d}-of-{parts:02d}" if parts > 1 else "")
        pair = write_pair(folder / name, documents[edges[part] : edges[part + 1]], dtype)
        described.append(describe(pair, vocab_size, fingerprint))
    counts = ("documents", "sequences", "tokens", "text_bytes")
    described[0].model_copy(
        update={
            "parts": tuple(part for manifest in described for part in manifest.parts),
            **{name: sum(getattr(manifest, name) for manifest in described) for name in counts},
        }
    ).write(folder / MANIFEST_FILE)
    return folder / MANIFEST_FILE


def open_corpus(folder: Path, documents, **options) -> TokenizedCorpus:
    """``write_corpus``, opened."""
    return TokenizedCorpus.open(write_corpus(folder, documents, **options))
