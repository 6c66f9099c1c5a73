"""``data/tokens/manifest.json``: what the tokenised corpus is, written after its files."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from lib.atomic import write_text_atomically
from lib.errors import UserError

MANIFEST_FILE = "manifest.json"
TOKENS_PREFIX = "corpus_text_document"


class TokensManifest(BaseModel):
    """Facts and checksums of a pair of ``.bin`` and ``.idx``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    """Version of this file's layout."""

    prefix: str = TOKENS_PREFIX
    """Name of the pair without its endings, in the manifest's folder."""

    dtype: str
    """Type of the tokens: uint16 for vocabularies below 65500, else int32."""

    documents: int
    """Documents in the pair."""

    sequences: int
    """Sequences in the pair: one for each document."""

    tokens: int
    """Tokens in the pair, ends of documents included."""

    text_bytes: int
    """UTF-8 bytes of text that the tokens stand for."""

    empty_documents: int
    """Documents without a token, left out."""

    cut_documents: int
    """Documents longer than the limit that were cut to it."""

    dropped_documents: int
    """Documents longer than the limit that were left out."""

    append_eod: bool
    """Whether the end-of-document token follows each document."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1."""

    eod_id: int
    """Id of the end-of-document token."""

    tokenizer_fingerprint: str
    """Fingerprint of the tokenizer."""

    corpus_sha256: str
    """sha256 over the checksums of the raw corpus's shards."""

    bin_sha256: str
    """sha256 of the .bin."""

    idx_sha256: str
    """sha256 of the .idx."""

    options: dict[str, Any]
    """Section ``tokens`` of the parameters, without what cannot change the result."""

    def write(self, folder: Path) -> None:
        """Writes ``manifest.json``."""
        text = json.dumps(self.model_dump(), indent=2) + "\n"
        write_text_atomically(folder / MANIFEST_FILE, text)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads ``manifest.json``.

        Raises:
            UserError: when it is missing or damaged.
        """
        path = folder / MANIFEST_FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path}: not there; the tokenize_corpus stage writes it") from None
        except ValidationError as error:
            raise UserError(f"{path}: damaged; run tokenize_corpus again: {error}") from None

    def differences(
        self, *, bin_sha256: str, tokenizer_fingerprint: str, vocab_size: int
    ) -> list[str]:
        """Where these tokens are not the ones described; empty when they are."""
        pairs = {
            "sha256 of the .bin": (self.bin_sha256, bin_sha256),
            "tokenizer": (self.tokenizer_fingerprint, tokenizer_fingerprint),
            "vocabulary": (self.vocab_size, vocab_size),
        }
        return [
            f"{name} {found} instead of {expected}"
            for name, (found, expected) in pairs.items()
            if found != expected
        ]
