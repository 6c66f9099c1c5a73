"""A raw corpus to Megatron's token files, on all cores or many machines, in flat memory.

One process reads the shards' frames, checks the shards' checksums, and hands the frames over as
they are, compressed. Workers decompress, decode and encode them. The results are written in the
order of the frames: the files are the same bytes for any number of workers. Frames not yet
written are limited in number and in size, so that a slow disk or one huge document holds the
reader back instead of filling the memory. After each shard the work so far is safe from a kill:
see lib/data/tokens_journal.py.

Processes rather than the library's own threads: threads wait for the longest document of each
batch, and their results must be turned into arrays while no thread works. A frame costs the
reading process about 2 ms beside the 200 ms that one core takes to encode it at 5 MB/s.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from lib.data.frame_encoding import Counts, Encoded, EncodingJob, Frame, encode_frame
from lib.data.indexed_dataset import dtype_for_vocab
from lib.data.manifest import RawManifest, Shard, check_sha256, check_size, read_manifest
from lib.data.options import TokensOptions
from lib.data.processes import NoProcesses, Pool, ProcessPool
from lib.data.shards import frame_size
from lib.data.tokenizer import TextTokenizer, load_tokenizer
from lib.data.tokens_journal import JournalKey
from lib.data.tokens_manifest import MANIFEST_FILE, TokensManifest
from lib.data.tokens_parts import Part, PartRecord, PartWriter, Workplace
from lib.errors import UserError

# Frames that may wait for each worker: enough that the others work on while one takes four times
# as long as usual. They are compressed while they wait, a fourth of a megabyte each.
_WAITING = 4
# Their bytes once decompressed, for each worker. A larger document is worked on alone.
_WAITING_BYTES = 8 << 20
# A process takes about a second to start: below so much text for each it would not pay.
_BYTES_PER_WORKER = 4 << 20
# While the oldest frame takes longer than this, the others are looked at for errors.
_SECONDS = 1.0

_Encoder = Pool[Frame, Encoded]


@dataclass(frozen=True)
class TokenizingTask:
    """What to tokenise, by what, and to where.

    Attributes:
        raw: the folder of a raw corpus.
        tokenizer: the folder that ``prepare_tokenizer`` wrote.
        output: the folder to write; one that is there is replaced.
        options: section ``tokens`` of the parameters.
        ray: address of a Ray cluster that does the work; None for processes of this machine.
    """

    raw: Path
    tokenizer: Path
    output: Path
    options: TokensOptions
    ray: str | None = None


class Progress(Protocol):
    """Who wants to know how the work goes."""

    def begin(self, done: Counts) -> None:
        """Told once, before the work: what an earlier run had finished."""
        ...

    def advance(self, done: Counts) -> None:
        """Told after each frame: what became of its documents."""
        ...


def tokenize_corpus(task: TokenizingTask, progress: Progress) -> TokensManifest:
    """Writes a corpus's token files and their manifest as one folder, whole or not at all.

    Parts that ``tokenize_part`` has written are taken as they are; they must be all there. What a
    killed run has left is gone on with.

    Raises:
        UserError: when no token comes out, a part is missing, the corpus is damaged, or a process
            dies.
    """
    work = _Work.open(task)
    parts = _parts_to_join(work)
    finished = [work.place.finished(part, work.key(part)) for part in parts]
    records = [record for record in finished if record]
    if records:
        progress.begin(_total(records))
    else:
        records = [_write_part(work, part, progress) for part in parts]
    manifest = _manifest(work, records)
    manifest.write(work.place.out / MANIFEST_FILE)
    work.place.publish(parts)
    return manifest


def tokenize_part(task: TokenizingTask, part: Part, progress: Progress) -> PartRecord:
    """Writes one part of a corpus beside the output, whole or not at all.

    ``tokenize_corpus`` makes all parts the output. Run at the same time for each part, on as many
    machines as there are parts; they share the output's folder. A part that is finished is left
    as it is.

    Raises:
        UserError: when the corpus is damaged, has fewer shards than parts, or a process dies.
    """
    work = _Work.open(task)
    finished = work.place.finished(part, work.key(part))
    return finished or _write_part(work, part, progress)


@dataclass(frozen=True)
class _Work:
    """A task with what it names opened."""

    task: TokenizingTask
    raw: RawManifest
    tokenizer: TextTokenizer

    @classmethod
    def open(cls, task: TokenizingTask) -> "_Work":
        return cls(task, read_manifest(task.raw), load_tokenizer(task.tokenizer))

    @property
    def place(self) -> Workplace:
        return Workplace(self.task.output)

    def key(self, part: Part) -> JournalKey:
        return JournalKey(
            corpus_sha256=self.raw.corpus_sha256(),
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            eod_id=self.tokenizer.eod_id,
            options=_deciding(self.task.options),
            part=part.name,
        )


def _deciding(options: TokensOptions) -> dict[str, object]:
    """The options that decide the bytes."""
    return options.model_dump(mode="json", exclude={"workers"})


def _parts_to_join(work: _Work) -> Sequence[Part]:
    """The parts that make up the corpus: those that ``tokenize_part`` has finished, or one."""
    missing: list[Part] = []
    for count in sorted({part.count for part in work.place.parts()} - {1}):
        parts = Part(count, 0).all_of_count()
        missing = [part for part in parts if not work.place.finished(part, work.key(part))]
        if not missing:
            return parts
    if missing:
        names = ", ".join(f"--shard {part.index}/{part.count}" for part in missing)
        raise UserError(
            f"{work.place.root}: has parts of this corpus, but not all of them are finished with "
            f"this corpus, tokenizer and options; run the missing ones: {names}; or remove that "
            "folder, so that this run does everything"
        )
    return (Part(1, 0),)


def _write_part(work: _Work, part: Part, progress: Progress) -> PartRecord:
    shards, number = part.cut(work.raw)
    dtype = dtype_for_vocab(work.tokenizer.vocab_size)
    with PartWriter(work.place, part, work.key(part), dtype) as writer:
        done, counts = writer.done
        progress.begin(counts)
        number += counts.documents
        for encoded, ends_shard in _encode_all(work, shards[done:]):
            writer.add(encoded, number)
            number += encoded.counts.documents
            if ends_shard:
                writer.end_shard()
            progress.advance(encoded.counts)
        return writer.finish()


def _manifest(work: _Work, records: Sequence[PartRecord]) -> TokensManifest:
    counts = _total(records)
    if counts.tokens == 0:
        raise UserError(_nothing_left(counts))
    return TokensManifest(
        parts=tuple(record.part for record in records),
        dtype=dtype_for_vocab(work.tokenizer.vocab_size).name,
        documents=counts.kept,
        sequences=counts.kept,
        tokens=counts.tokens,
        text_bytes=counts.text_bytes,
        empty_documents=counts.empty,
        short_documents=counts.short,
        cut_documents=counts.cut,
        dropped_documents=counts.dropped,
        append_eod=work.task.options.append_eod,
        vocab_size=work.tokenizer.vocab_size,
        eod_id=work.tokenizer.eod_id,
        tokenizer_fingerprint=work.tokenizer.fingerprint,
        corpus_sha256=work.raw.corpus_sha256(),
        options=_deciding(work.task.options),
    )


def _total(records: Sequence[PartRecord]) -> Counts:
    total = Counts()
    for record in records:
        total.add(record.counts)
    return total


def _nothing_left(counts: Counts) -> str:
    return (
        f"no tokens: of {counts.documents} documents {counts.empty} are empty, {counts.short} "
        f"shorter than tokens.min_document_tokens, and {counts.dropped} longer than "
        "tokens.max_document_tokens and dropped; use another corpus, or other limits"
    )


class _Task(NamedTuple):
    """A frame to encode, its size decompressed, and whether it is the last of its shard."""

    frame: Frame
    size: int
    ends_shard: bool


class _Waiting(NamedTuple):
    """A frame that is being encoded."""

    result: Future[Encoded]
    size: int
    ends_shard: bool


def _encode_all(work: _Work, shards: Sequence[Shard]) -> Iterator[tuple[Encoded, bool]]:
    """Encodes all frames, in order; with each, whether it is the last of its shard."""
    waiting: deque[_Waiting] = deque()
    with _pool(work, sum(shard.text_bytes for shard in shards)) as pool:
        for task in _read_frames(work.task.raw, shards):
            while waiting and _is_full(waiting, task, pool.count):
                yield _next(waiting)
            waiting.append(_Waiting(pool.submit(task.frame), task.size, task.ends_shard))
        while waiting:
            yield _next(waiting)


def _pool(work: _Work, text_bytes: int) -> _Encoder:
    task = work.task
    job = EncodingJob(task.tokenizer.absolute(), work.tokenizer.fingerprint, task.options)
    encode = partial(encode_frame, job)
    if task.ray is not None:
        from lib.data.ray_pool import RayPool

        return RayPool(encode, task.ray, task.options.workers)
    workers = min(
        task.options.workers or len(os.sched_getaffinity(0)), text_bytes // _BYTES_PER_WORKER
    )
    return ProcessPool(encode, workers) if workers else NoProcesses(encode)


def _read_frames(raw: Path, shards: Sequence[Shard]) -> Iterator[_Task]:
    """The frames of shards in order; a shard's last one is given when its checksum is right."""
    for shard in shards:
        path = check_size(raw, shard)
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for number, size in enumerate(shard.frames, start=1):
                data = file.read(size)
                digest.update(data)
                ends_shard = number == len(shard.frames)
                if ends_shard:
                    check_sha256(path, shard, digest.hexdigest())
                yield _Task(Frame(data, path), frame_size(data, path), ends_shard)


def _is_full(waiting: deque[_Waiting], task: _Task, workers: int) -> bool:
    """Whether the next frame must wait until the oldest is done."""
    size = task.size + sum(item.size for item in waiting)
    return len(waiting) >= workers * _WAITING or size > workers * _WAITING_BYTES


def _next(waiting: deque[_Waiting]) -> tuple[Encoded, bool]:
    """The oldest frame's result; an error of any other ends the wait for it."""
    oldest = waiting.popleft()
    while not wait([oldest.result], _SECONDS).done:
        for item in waiting:
            if item.result.done():
                item.result.result()
    return oldest.result.result(), oldest.ends_shard
