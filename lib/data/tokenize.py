"""A corpus of texts to Megatron's token files, on all cores, in flat memory.

Texts are gathered into batches, processes encode the batches, and the results are written in the
order of the texts: the files are the same bytes for any number of processes. Batches not yet
written are limited in number and in size, so that a slow disk or one huge document holds the
reader back instead of filling the memory.

Processes rather than the library's own threads. Measured on 36 MB of Python source, in CPU time:
the encoding takes 16 s either way. Beside it, with processes, one core reads, hands over and writes
for 0.3 s, so about 50 processes can be kept busy. With threads that core also turns all results
into arrays, 0.6 s more, while no thread works; and threads wait for the longest document of each
batch: two of them were no faster than one.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lib.atomic import atomic_directory, sha256_of
from lib.data.indexed_dataset import IndexedDatasetWriter, bin_path, dtype_for_vocab, idx_path
from lib.data.options import TokensOptions
from lib.data.processes import ProcessPool
from lib.data.tokenizer import TextTokenizer, load_tokenizer, token_byte_lengths
from lib.data.tokens_manifest import TOKENS_PREFIX, TokensManifest
from lib.errors import UserError

# Characters of text per batch: large enough that handing it over costs nothing, small enough that
# the processes finish together.
_BATCH = 1 << 20
# Batches that may wait per process: one in work, one ready.
_WAITING = 2
# A process takes about a second to start: below so much text for each it would not pay.
_BYTES_PER_WORKER = 4 << 20


@dataclass(frozen=True)
class Corpus:
    """The texts to tokenise and what their manifest says of them.

    Attributes:
        texts: the documents in their order.
        text_bytes: their UTF-8 bytes, in all.
        sha256: checksum of the corpus.
    """

    texts: Iterable[str]
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class _Job:
    """What a process needs to know to encode a batch."""

    tokenizer: Path
    fingerprint: str
    options: TokensOptions


@dataclass
class _Counts:
    """Documents by what became of them."""

    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    cut: int = 0
    dropped: int = 0

    def add(self, other: "_Counts") -> None:
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.empty += other.empty
        self.cut += other.cut
        self.dropped += other.dropped


@dataclass(frozen=True)
class _Encoded:
    """A batch after encoding: tokens back to back, and tokens per kept document."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    counts: _Counts


def tokenize_corpus(
    corpus: Corpus,
    tokenizer_folder: Path,
    output: Path,
    options: TokensOptions,
    advance: Callable[[int], None],
) -> TokensManifest:
    """Writes the pair of token files and their manifest as one folder, whole or not at all.

    Args:
        corpus: what to tokenise.
        tokenizer_folder: where ``prepare_tokenizer`` left the tokenizer.
        output: the folder to write; one that is there is replaced.
        options: section ``tokens`` of the parameters.
        advance: told the number of documents done.

    Raises:
        UserError: when no token comes out, or a process dies.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    job = _Job(tokenizer_folder.absolute(), tokenizer.fingerprint, options)
    counts = _Counts()
    with atomic_directory(output) as folder:
        prefix = folder / TOKENS_PREFIX
        dtype = dtype_for_vocab(tokenizer.vocab_size)
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for batch in _encode_all(corpus.texts, job, _workers(options, corpus.text_bytes)):
                writer.add_documents(batch.tokens, batch.lengths)
                counts.add(batch.counts)
                advance(batch.counts.documents)
        if writer.num_tokens == 0:
            raise UserError(_nothing_left(counts))
        manifest = TokensManifest(
            dtype=dtype.name,
            documents=writer.num_documents,
            sequences=writer.num_sequences,
            tokens=writer.num_tokens,
            text_bytes=counts.text_bytes,
            empty_documents=counts.empty,
            cut_documents=counts.cut,
            dropped_documents=counts.dropped,
            append_eod=options.append_eod,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
            corpus_sha256=corpus.sha256,
            bin_sha256=sha256_of(bin_path(prefix)),
            idx_sha256=sha256_of(idx_path(prefix)),
            options=options.model_dump(exclude={"workers"}),
        )
        manifest.write(folder)
    return manifest


def _workers(options: TokensOptions, text_bytes: int) -> int:
    """Processes to start; 0 means that the work is too little to start any."""
    available = options.workers or len(os.sched_getaffinity(0))
    return min(available, text_bytes // _BYTES_PER_WORKER)


def _nothing_left(counts: _Counts) -> str:
    return (
        f"no tokens: of {counts.documents} documents {counts.empty} are empty and "
        f"{counts.dropped} longer than tokens.max_document_tokens and dropped; use another corpus, "
        "or a higher limit"
    )


def _encode_all(texts: Iterable[str], job: _Job, workers: int) -> Iterator[_Encoded]:
    """Encodes all texts, in order."""
    batches = _batches(texts)
    if workers == 0:
        for batch in batches:
            yield _encode_batch(job, batch)
        return
    waiting: deque[tuple[Future[_Encoded], int]] = deque()
    with ProcessPool(partial(_encode_batch, job), workers) as pool:
        for batch in batches:
            waiting.append((pool.submit(batch), sum(map(len, batch))))
            while _is_full(waiting, workers):
                yield waiting.popleft()[0].result()
        while waiting:
            yield waiting.popleft()[0].result()


def _is_full(waiting: deque[tuple[Future[_Encoded], int]], workers: int) -> bool:
    """Whether the reader must wait for the oldest batch."""
    size = sum(characters for _, characters in waiting)
    limit = workers * _WAITING
    return len(waiting) > limit or (len(waiting) > 1 and size > limit * _BATCH)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Gathers texts into lists of about ``_BATCH`` characters; a longer text has its own."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _BATCH:
            yield batch
            batch = []
            size = 0
        batch.append(text)
        # An empty text counts as something, or a corpus of them would be one batch.
        size += len(text) + 1
    if batch:
        yield batch


@cache
def _open(folder: Path, fingerprint: str) -> tuple[TextTokenizer, npt.NDArray[np.int32]]:
    """The tokenizer and its byte lengths, read once in a process."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{folder}: the tokenizer was changed while the corpus was tokenised")
    return tokenizer, token_byte_lengths(tokenizer)


def _encode_batch(job: _Job, texts: list[str]) -> _Encoded:
    """Encodes texts and applies the rules for empty and long ones."""
    tokenizer, byte_lengths = _open(job.tokenizer, job.fingerprint)
    limit = job.options.max_document_tokens
    end = np.array([tokenizer.eod_id] if job.options.append_eod else [], dtype=np.int32)
    counts = _Counts(documents=len(texts))
    parts: list[npt.NDArray[np.int32]] = []
    lengths: list[int] = []
    for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True):
        if ids.size == 0:
            counts.empty += 1
            continue
        size = len(text.encode())
        if limit is not None and ids.size > limit:
            if job.options.long_documents == "drop":
                counts.dropped += 1
                continue
            ids = ids[:limit]
            size = int(byte_lengths[ids].sum())
            counts.cut += 1
        counts.text_bytes += size
        parts += [ids, end]
        lengths.append(ids.size + end.size)
    dtype = dtype_for_vocab(tokenizer.vocab_size)
    tokens = np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
    return _Encoded(tokens, np.array(lengths, dtype=np.int64), counts)
