"""``data/tokens/NAME/manifest.json``: what a tokenised corpus is, written after its files.

Its tokens lie in one pair of ``.bin`` and ``.idx``, or in several that follow each other (parts):
the corpus is then their tokens in that order, whatever the number of parts. A pair made elsewhere
has a file of the same form beside it, ``PREFIX.manifest.json``.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lib.atomic import write_text_atomically
from lib.errors import UserError

MANIFEST_FILE = "manifest.json"
TOKENS_PREFIX = "corpus_text_document"
LEFT_OUT_FILE = "left_out.npy"


class TokensPart(BaseModel):
    """One pair of ``.bin`` and ``.idx``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: str
    """Path of the pair without its endings: relative to the manifest's folder, or absolute."""

    documents: int
    """Documents in the pair, empty ones included."""

    tokens: int
    """Tokens in the pair, ends of documents included."""

    bin_sha256: str
    """sha256 of the .bin."""

    idx_sha256: str
    """sha256 of the .idx."""


class TokensManifest(BaseModel):
    """Facts and checksums of a tokenised corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    """Version of this file's layout."""

    parts: tuple[TokensPart, ...] = Field(min_length=1)
    """The pairs of files, in the order of their documents."""

    dtype: str
    """Type of the tokens, such as uint16, which Megatron's writer takes for vocabularies below
    65500, or int32."""

    documents: int
    """Documents in all parts."""

    sequences: int
    """Sequences in all parts: one for each document where this project made them."""

    tokens: int
    """Tokens in all parts, ends of documents included."""

    text_bytes: int
    """UTF-8 bytes of text that the tokens stand for."""

    empty_documents: int = 0
    """Documents without a token, left out."""

    short_documents: int = 0
    """Documents shorter than the lower limit, left out."""

    cut_documents: int = 0
    """Documents longer than the upper limit that were cut to it."""

    dropped_documents: int = 0
    """Documents longer than the upper limit, left out."""

    append_eod: bool
    """Whether the end-of-document token follows each document."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1."""

    eod_id: int
    """Id of the end-of-document token."""

    tokenizer_fingerprint: str
    """Fingerprint of the tokenizer."""

    corpus_sha256: str | None
    """sha256 over the checksums of the raw corpus's shards; null for a pair made elsewhere, whose
    texts are not at hand."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Section ``tokens`` of the parameters, without what cannot change the result."""

    @property
    def tokens_sha256(self) -> str:
        """One checksum of all tokens: the .bin's, or that of the parts' checksums, one a line."""
        if len(self.parts) == 1:
            return self.parts[0].bin_sha256
        lines = "".join(f"{part.bin_sha256}\n" for part in self.parts)
        return hashlib.sha256(lines.encode()).hexdigest()

    def prefixes(self, manifest: Path) -> tuple[Path, ...]:
        """The parts' paths without their endings, for a manifest read from that path."""
        return tuple(manifest.parent / part.prefix for part in self.parts)

    def write(self, manifest: Path) -> None:
        """Writes the manifest to that path, whole or not at all."""
        write_text_atomically(manifest, json.dumps(self.model_dump(), indent=2) + "\n")

    @classmethod
    def load(cls, manifest: Path) -> Self:
        """Reads the manifest of that path.

        Raises:
            UserError: when it is missing, damaged or of another layout.
        """
        try:
            return cls.model_validate_json(manifest.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{manifest}: not there; the tokenize_corpus stage writes it") from None
        except (ValidationError, UnicodeDecodeError) as error:
            raise UserError(f"{manifest}: {_first(error)}; run tokenize_corpus again") from None

    def differences(
        self, *, tokens_sha256: str, tokenizer_fingerprint: str, vocab_size: int
    ) -> list[str]:
        """Where these tokens are not the ones described; empty when they are."""
        pairs = {
            "sha256 of the tokens": (self.tokens_sha256, tokens_sha256),
            "tokenizer": (self.tokenizer_fingerprint, tokenizer_fingerprint),
            "vocabulary": (self.vocab_size, vocab_size),
        }
        return [
            f"{name} {found} instead of {expected}"
            for name, (found, expected) in pairs.items()
            if found != expected
        ]


def _first(error: ValidationError | UnicodeDecodeError) -> str:
    """The first thing that is wrong, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return "damaged, it is no text"
    first = error.errors()[0]
    field = ".".join(str(step) for step in first["loc"])
    return f"damaged or of another version ({field + ': ' if field else ''}{first['msg']})"


def read_left_out(manifest: Path) -> npt.NDArray[np.int64]:
    """Which documents of the raw corpus gave no tokens: ``left_out.npy`` beside the manifest.

    Returns:
        int64, increasing: numbers over the whole raw corpus of the documents that are empty, too
        short or dropped. Mapped, not read, since there may be many.
    """
    path = manifest.parent / LEFT_OUT_FILE
    try:
        numbers: npt.NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run tokenize_corpus again") from None
    return numbers


def raw_document_of(document: int, left_out: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """The number in the raw corpus of a document of the tokens.

    Before the raw document ``left_out[i]`` stand ``left_out[i] - i`` documents with tokens. So
    ``document`` comes after those left out for which that is at most its own number.
    """
    found = range(len(left_out))
    return document + bisect_right(found, document, key=lambda i: int(left_out[i]) - i)
