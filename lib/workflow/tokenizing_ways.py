"""Ways of turning a corpus into token ids on all cores, for comparing their speed and memory.

Each runs in a fresh process. Ours and Megatron's read a file and write token files. The libraries
alone have all text in memory, in processes forked from the one that holds it, and drop what they
make: no program built on them could be faster.
"""

import json
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import tiktoken

from lib.cli import die_with_parent
from lib.data.frame_encoding import Counts
from lib.data.indexed_dataset import bin_path, dtype_for_vocab, idx_path
from lib.data.options import TokensOptions
from lib.data.shards import iter_raw_documents
from lib.data.split_pattern import split_pattern_of
from lib.data.tiktoken_encoding import merge_ranks
from lib.data.tokenize import TokenizingTask, tokenize_corpus
from lib.data.tokenizer import TextTokenizer, load_tokenizer
from lib.data.tokens_manifest import TOKENS_PREFIX
from lib.errors import UserError

# Characters of text that a process of a library alone takes at once.
_SLICE = 1 << 20
# Lines that Megatron's preprocess_data.py hands to a process at once.
_LINES = 32
_SECONDS_BETWEEN_LOOKS = 0.2
_START_SECONDS = 600.0

Encode = Callable[[list[str]], object]


@dataclass(frozen=True)
class Job:
    """What to tokenise, by what, and where to write.

    Attributes:
        raw: a folder such as ``data/raw/NAME``.
        lines: the same documents as one JSON object a line.
        tokenizer: the folder ``data/tokenizer``.
        output: a folder that is there.
        workers: processes.
    """

    raw: Path
    lines: Path
    tokenizer: Path
    output: Path
    workers: int


@dataclass
class Stretch:
    """Text done, and when: from which the speed with all workers warm comes.

    The clock starts when the first result is there. The text of as many results as there are
    workers is not counted, since that may have been done before.

    Attributes:
        warm_up: results whose text is not counted.
    """

    warm_up: int
    _results: int = 0
    _bytes: int = 0
    _first: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def add(self, text_bytes: int) -> None:
        """Counts a result that has just come."""
        self._first = self._first or time.perf_counter()
        self._results += 1
        if self._results > self.warm_up:
            self._bytes += text_bytes
        self._last = time.perf_counter()

    def speed(self) -> float:
        """MB of text per second."""
        if not self._bytes:
            raise UserError("the text is too little to measure with; give more --megabytes")
        return self._bytes / 1e6 / (self._last - self._first)


@dataclass(frozen=True)
class Outcome:
    """How a way did.

    Attributes:
        warm: MB of text per second from the first document to the last, workers warm.
        seconds: of the whole process.
        memory: most bytes at one time, of all its processes; pages that several share count once.
    """

    warm: float
    seconds: float
    memory: int


def drydock(job: Job) -> float:
    """As the stage does it."""
    clock = _Clock(Stretch(job.workers))
    task = TokenizingTask(
        job.raw, job.tokenizer, job.output / "drydock", TokensOptions(workers=job.workers)
    )
    tokenize_corpus(task, clock)
    return clock.stretch.speed()


@dataclass
class _Clock:
    stretch: Stretch

    def begin(self, done: Counts) -> None:
        pass

    def advance(self, done: Counts) -> None:
        self.stretch.add(done.read_bytes)


def tiktoken_alone(job: Job) -> float:
    """The library tiktoken with the tokenizer's pattern; the caller knows that the ids are same."""

    def encoder(tokenizer: TextTokenizer) -> Encode:
        content = json.loads(tokenizer.backend.to_str())
        encoding = tiktoken.Encoding(
            "alone",
            pat_str=split_pattern_of(content) or "",
            mergeable_ranks=merge_ranks(content) or {},
            special_tokens={},
        )
        return partial(map, encoding.encode_ordinary)

    return _from_memory(job, encoder)


def tiktoken_regrouped(job: Job) -> float:
    """The library tiktoken with the pattern as Drydock gives it, and arrays in place of lists."""
    return _from_memory(job, lambda tokenizer: tokenizer.encode_many)


def tokenizers_alone(job: Job) -> float:
    """The library tokenizers."""

    def encoder(tokenizer: TextTokenizer) -> Encode:
        return partial(tokenizer.backend.encode_batch_fast, add_special_tokens=False)

    return _from_memory(job, encoder)


def _from_memory(job: Job, encoder: Callable[[TextTokenizer], Encode]) -> float:
    slices, sizes = _slices(job.raw)
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(job.workers + 1)
    taken = context.Value("q", 0)

    def work() -> None:
        die_with_parent()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encode = encoder(load_tokenizer(job.tokenizer))
        _exhaust(encode(slices[0]))
        ready.wait(_START_SECONDS)
        while True:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(slices):
                return
            _exhaust(encode(slices[number]))

    workers = [context.Process(target=work) for _ in range(job.workers)]
    for worker in workers:
        worker.start()
    ready.wait(_START_SECONDS)
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    if any(worker.exitcode for worker in workers):
        raise UserError("a process died, most likely for want of memory; give fewer --megabytes")
    return sum(sizes) / 1e6 / seconds


def _exhaust(results: object) -> None:
    if isinstance(results, Iterator):
        for _ in results:
            pass


def _slices(raw: Path) -> tuple[list[list[str]], list[int]]:
    """All texts of a corpus in lists of about a million characters, and the bytes of each list."""
    slices: list[list[str]] = [[]]
    sizes = [0]
    for document in iter_raw_documents(raw):
        if sizes[-1] >= _SLICE:
            slices.append([])
            sizes.append(0)
        slices[-1].append(document.text)
        sizes[-1] += len(document.text.encode())
    return slices, sizes


def megatron(job: Job) -> float:
    """As Megatron's preprocess_data.py: a pool of processes, one ``encode`` for each line.

    Written by megatron-core's own builder where it is installed, and else not at all.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    prefix = job.output / TOKENS_PREFIX
    builder = _megatron_builder(prefix, tokenizer.vocab_size)
    stretch = Stretch(job.workers * _LINES)
    initial = (job.tokenizer,)
    with (
        multiprocessing.get_context("fork").Pool(job.workers, _load, initial) as pool,
        job.lines.open(encoding="utf-8") as lines,
    ):
        for ids, size in pool.imap(_encode_line, lines, _LINES):
            if builder is not None and ids:
                builder.add_document(ids, [len(ids)])
            stretch.add(size)
    if builder is not None:
        builder.finalize(str(idx_path(prefix)))
    return stretch.speed()


def _megatron_builder(prefix: Path, vocab_size: int) -> Any:  # noqa: ANN401 - it has no types
    try:
        with warnings.catch_warnings(action="ignore"):  # of other packages that it would like
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError:
        return None
    return IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype_for_vocab(vocab_size).type)


_loaded: list[TextTokenizer] = []


def _load(folder: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _loaded.append(load_tokenizer(folder))


def _encode_line(line: str) -> tuple[list[int], int]:
    """The ids of a document with its end, and its text's size."""
    (tokenizer,) = _loaded
    text = json.loads(line)["text"]
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return [*ids, tokenizer.eod_id] if ids else [], len(text.encode())


OURS = "Drydock"
REGROUPED = "tiktoken, our pattern"
FROM_MEMORY = {REGROUPED, "tiktoken alone", "tokenizers alone"}
WAYS: dict[str, Callable[[Job], float]] = {
    OURS: drydock,
    REGROUPED: tiktoken_regrouped,
    "tiktoken alone": tiktoken_alone,
    "tokenizers alone": tokenizers_alone,
    "Megatron's way": megatron,
}


def measure(way: str, job: Job, *, memory: bool) -> Outcome:
    """Runs one way in a fresh process.

    Args:
        way: a name of ``WAYS``.
        job: what it works on.
        memory: whether to look at the memory, which takes time from what works.

    Raises:
        UserError: when it fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(way, job, theirs))
    started = time.perf_counter()
    process.start()
    theirs.close()
    watch = _Watch(process.pid or 0)
    if memory:
        watch.start()
    try:
        warm: float | UserError = ours.recv()
    except EOFError:
        warm = UserError(f"{way}: the process died, most likely for want of memory")
    process.join()
    seconds = time.perf_counter() - started
    watch.stop()
    if isinstance(warm, UserError):
        raise warm
    return Outcome(warm, seconds, watch.most)


def _run(way: str, job: Job, connection: Connection) -> None:
    die_with_parent()
    try:
        connection.send(WAYS[way](job))
    except UserError as error:
        connection.send(error)


class _Watch(threading.Thread):
    """Looks at the memory of a process and all it started, again and again."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._ended = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            self.most = max(self.most, _memory(self._process))

    def stop(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()


def _memory(number: int) -> int:
    """Proportional set size of a process and its children, in bytes."""
    try:
        process = psutil.Process(number)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for one in family:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total
