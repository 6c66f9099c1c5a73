"""A frame of the raw corpus to tokens: the work of one task, done in any process of any machine."""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lib.data.indexed_dataset import dtype_for_vocab
from lib.data.options import TokensOptions
from lib.data.shards import frame_texts
from lib.data.tokenizer import TextTokenizer, load_tokenizer, token_byte_lengths
from lib.errors import UserError


@dataclass(frozen=True)
class EncodingJob:
    """What a process needs to know beside the frames.

    Attributes:
        tokenizer: the folder that ``prepare_tokenizer`` wrote.
        fingerprint: of that tokenizer; another one in the same folder is refused.
        options: section ``tokens`` of the parameters.
    """

    tokenizer: Path
    fingerprint: str
    options: TokensOptions


class Frame(NamedTuple):
    """A compressed frame, and the file that it comes from."""

    data: bytes
    path: Path


@dataclass
class Counts:
    """What became of documents.

    Attributes:
        documents: documents read.
        read_bytes: UTF-8 bytes of their texts.
        kept: documents that gave tokens.
        tokens: their tokens, ends of documents included.
        text_bytes: UTF-8 bytes of text that these stand for.
        empty: documents without a token, left out.
        short: documents below the lower limit, left out.
        cut: documents above the upper limit, cut to it.
        dropped: documents above the upper limit, left out.
    """

    documents: int = 0
    read_bytes: int = 0
    kept: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    short: int = 0
    cut: int = 0
    dropped: int = 0

    def add(self, other: "Counts") -> None:
        """Adds up both."""
        for field in fields(self):
            value = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, value)


@dataclass(frozen=True)
class Encoded:
    """A frame after encoding.

    Attributes:
        tokens: of all kept documents, back to back.
        lengths: int32 tokens of each kept document.
        left_out: int64 numbers, within the frame, of the documents that gave none.
        counts: what became of the documents.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    left_out: npt.NDArray[np.int64]
    counts: Counts


def encode_frame(job: EncodingJob, frame: Frame) -> Encoded:
    """Encodes the documents of a frame and applies the rules for short and long ones.

    Raises:
        UserError: where the frame is damaged, or the tokenizer was changed meanwhile.
    """
    tokenizer, byte_lengths = _open(job.tokenizer, job.fingerprint)
    texts = frame_texts(frame.data, frame.path)
    documents = list(tokenizer.encode_many(texts))
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    sizes = np.fromiter(map(_utf8_bytes, texts), np.int64, len(texts))
    read_bytes = int(sizes.sum())
    fates = _fates(lengths, job.options)
    for number in np.flatnonzero(fates.cut):
        documents[number] = documents[number][: job.options.max_document_tokens]
        lengths[number] = documents[number].size
        sizes[number] = byte_lengths[documents[number]].sum()
    kept = np.flatnonzero(fates.kept)
    end = tokenizer.eod_id if job.options.append_eod else None
    tokens = _joined(
        [documents[number] for number in kept], end, dtype_for_vocab(tokenizer.vocab_size)
    )
    counts = Counts(
        documents=len(texts),
        read_bytes=read_bytes,
        kept=kept.size,
        tokens=tokens.size,
        text_bytes=int(sizes[kept].sum()),
        empty=int(fates.empty.sum()),
        short=int(fates.short.sum()),
        cut=int(fates.cut.sum()),
        dropped=int(fates.dropped.sum()),
    )
    kept_lengths = (lengths[kept] + (end is not None)).astype(np.int32)
    return Encoded(tokens, kept_lengths, np.flatnonzero(~fates.kept), counts)


class _Fates(NamedTuple):
    """Which documents share a fate: bool arrays over the documents."""

    empty: npt.NDArray[np.bool_]
    short: npt.NDArray[np.bool_]
    cut: npt.NDArray[np.bool_]
    dropped: npt.NDArray[np.bool_]

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        return ~(self.empty | self.short | self.dropped)


def _fates(lengths: npt.NDArray[np.int64], options: TokensOptions) -> _Fates:
    """What becomes of documents of these numbers of tokens."""
    empty = lengths == 0
    short = ~empty & (lengths < (options.min_document_tokens or 0))
    limit = options.max_document_tokens
    none = np.zeros_like(empty)
    long = lengths > limit if limit is not None else none
    cut, dropped = (none, long) if options.long_documents == "drop" else (long, none)
    return _Fates(empty, short, cut, dropped)


def _joined(
    documents: list[npt.NDArray[np.int32]], end: int | None, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """All documents' tokens back to back, each with the token ``end`` after it if there is one."""
    tail = np.array([] if end is None else [end], dtype=np.int32)
    pieces = [piece for document in documents for piece in (document, tail)]
    return np.concatenate([tail[:0], *pieces], dtype=dtype, casting="unsafe")


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@cache
def _open(folder: Path, fingerprint: str) -> tuple[TextTokenizer, npt.NDArray[np.int32]]:
    """The tokenizer and its byte lengths, read once in a process."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{folder}: the tokenizer was changed while the corpus was tokenised")
    return tokenizer, token_byte_lengths(tokenizer)
