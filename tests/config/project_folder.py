"""A folder with the project's parameters and small tokenised corpora, for tests of their rules."""

import json
from pathlib import Path

import numpy as np

from lib.data.indexed_dataset import IndexedDatasetWriter
from lib.data.tokens_manifest import TokensManifest, TokensPart

ROOT = Path(__file__).parents[2]
DOCUMENT_TOKENS = 100


def write_tokens(manifest: Path, prefix: str, documents: int) -> None:
    """A pair of equal documents beside its manifest."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(manifest.parent / prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(np.arange(DOCUMENT_TOKENS, dtype=np.uint16))
    tokens = documents * DOCUMENT_TOKENS
    part = TokensPart(
        prefix=prefix, documents=documents, tokens=tokens, bin_sha256="bb", idx_sha256="cc"
    )
    TokensManifest(
        parts=(part,),
        dtype="uint16",
        documents=documents,
        sequences=documents,
        tokens=tokens,
        text_bytes=1,
        append_eod=True,
        vocab_size=4096,
        eod_id=0,
        tokenizer_fingerprint="ff",
        corpus_sha256="aa",
    ).write(manifest)


def write_data(folder: Path, documents: int = 200, fingerprint: str = "ff") -> None:
    """A tokenised corpus, and its tokenizer's facts."""
    manifest = folder / "data" / "tokens" / "stdlib" / "manifest.json"
    write_tokens(manifest, "corpus_text_document", documents)
    tokenizer = folder / "data" / "tokenizer"
    tokenizer.mkdir()
    info = {
        "format": 1,
        "kind": "train_bpe",
        "vocab_size": 4096,
        "end_of_document": {"token": "<|endoftext|>", "id": 0},
        "special_tokens": {"<|endoftext|>": 0},
        "fingerprint": fingerprint,
    }
    (tokenizer / "tokenizer_info.json").write_text(json.dumps(info))


def change(folder: Path, old: str, new: str) -> None:
    path = folder / "params.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
