"""How long it takes to save and to load a checkpoint, beside plain writing of as many bytes.

One round measures in turn, so that a disk whose pace changes is as fast or slow for all::

    steps                      nothing else going on
    save                       training waits until it is on disk
    save in the background     training waits for a copy in memory; steps until it is on disk
    load                       all files are hashed, then the tensors are read (by then from memory)
    plain files                as many bytes written, synced and read, by one stream and by many

Many streams are as many as a save uses: threads of all ranks. What is read first was dropped from
the system's cache before (on Linux; elsewhere all is from memory). A gigabyte is 10^9 bytes.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread

from torch import Tensor

from lib.checkpoint.background import Saver
from lib.checkpoint.directory import Damaged, iteration_path, read_pointer
from lib.checkpoint.loading import LoadedCheckpoint, find_latest, load_tensors
from lib.checkpoint.ranks import file_threads, gather, on_rank_zero, rank_and_size
from lib.checkpoint.retention import Retention

_BLOCK = 1 << 24
_SECONDS_BETWEEN_LOOKS = 0.005
# The last checkpoint, and the next one or plain files of its size.
COPIES_ON_DISK = 2


@dataclass(frozen=True)
class Subject:
    """What is saved and what goes on meanwhile; the same on every rank.

    Attributes:
        step: takes one optimizer step and waits for the device.
        tensors: this rank's, as a run saves them.
        directory: an empty folder on the disk to measure, seen by all ranks.
        steps: to take in a row without a save.
        rounds: of all measurements, at least 2: the first save in the background makes buffers.
    """

    step: Callable[[], object]
    tensors: Callable[[], dict[str, Tensor]]
    directory: Path
    steps: int
    rounds: int


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds, each of the slowest rank, in seconds.

    Attributes:
        bytes: of one checkpoint's files.
        files: of one checkpoint.
        streams: files that are written at once, over all ranks.
        step: one optimizer step.
        step_meanwhile: the same while a checkpoint is written in the background.
        save: in the foreground, until it is on disk.
        first_stall: of training by the first save in the background, which makes its buffers.
        stall: by the later ones.
        on_disk: from the begin of a save in the background until it is the one to resume from.
        verify: hashing a checkpoint's files.
        read: its tensors into the model and the optimizer.
        write_one: plain writing of as many bytes, one stream.
        write_many: the same by as many streams as a save.
        read_one: plain reading, one stream.
        read_many: the same by as many streams as a save.
    """

    bytes: int
    files: int
    streams: int
    step: float
    step_meanwhile: float
    save: float
    first_stall: float
    stall: float
    on_disk: float
    verify: float
    read: float
    write_one: float
    write_many: float
    read_one: float
    read_many: float

    def rows(self) -> list[tuple[str, str, str, str]]:
        """A table: what, seconds, gigabytes per second, and that beside plain files."""
        write, read = self.write_many, self.read_many
        load = self.verify + self.read
        return [
            ("training step", f"{self.step:.3f}", "", ""),
            self._meanwhile(),
            self._row("save while training waits", self.save, write),
            self._row("save in the background: training waits", self.stall),
            self._row("  the first time, which makes buffers", self.first_stall),
            self._row("  until it is on disk", self.on_disk, write),
            self._row("load", load, read),
            self._row("  of it verifying", self.verify, read),
            self._row("  of it reading", self.read, read),
            self._row("plain files: written by 1 stream", self.write_one),
            self._row(f"  by {self.streams}, as many as a save has", self.write_many),
            self._row("  read by 1 stream", self.read_one),
            self._row(f"  by {self.streams}", self.read_many),
        ]

    def _meanwhile(self) -> tuple[str, str, str, str]:
        ratio = self.step_meanwhile / self.step
        return ("  while a save is written", f"{self.step_meanwhile:.3f}", "", f"{ratio:.2f} x")

    def _row(
        self, name: str, seconds: float, plain: float | None = None
    ) -> tuple[str, str, str, str]:
        rate = f"{self.bytes / seconds / 1e9:.3g}"
        return (name, f"{seconds:.3f}", rate, "" if plain is None else f"{plain / seconds:.2f}")


def measure(subject: Subject) -> Figures:
    """Measures; all ranks call it and get the same figures.

    Raises:
        UserError: a save fails.
    """
    assert subject.rounds >= 2
    saver = Saver(subject.directory, Retention(1), background=True)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(subject.steps):  # to warm up
        subject.step()
    sizes: list[int] = []
    for number in range(subject.rounds):
        seconds["step"] += [_timed(subject.step) for _ in range(subject.steps)]
        _save(subject, saver, 2 * number + 1, seconds)
        _save_in_background(subject, saver, 2 * number + 2, seconds)
        sizes = _load(subject, 2 * number + 2, seconds)
        _use_plain_files(subject.directory, sum(sizes), seconds)
    gather(None)  # whoever is first here must not remove what others still look for
    first_stall = seconds["stall"].pop(0)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    streams = _streams_of_all()
    return Figures(sum(sizes), len(sizes), streams, first_stall=first_stall, **medians)


def _timed(work: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes, all of them starting together."""
    gather(None)
    started = time.perf_counter()
    work()
    return max(gather(time.perf_counter() - started))


def _streams_of_all() -> int:
    return rank_and_size()[1] * file_threads()


def _save(subject: Subject, saver: Saver, number: int, seconds: dict[str, list[float]]) -> None:
    tensors = subject.tensors()
    seconds["save"].append(_timed(lambda: saver.save(number, tensors, {})))


def _save_in_background(
    subject: Subject, saver: Saver, number: int, seconds: dict[str, list[float]]
) -> None:
    """Trains on until the checkpoint is the one to resume from; one step at least."""
    tensors = subject.tensors()
    gather(None)
    watch = _Watch(subject.directory, number)
    watch.start()
    seconds["stall"].append(_timed(lambda: saver.start(number, tensors, {})))
    is_over = False
    while not is_over:
        seconds["step_meanwhile"].append(_timed(subject.step))
        is_over = on_rank_zero(lambda: watch.has_seen_it or saver.failed)
    saver.finish()
    watch.join()
    seconds["on_disk"].append(on_rank_zero(lambda: watch.seconds))


class _Watch(Thread):
    """Looks, beside the training, when a checkpoint becomes the one to resume from."""

    def __init__(self, directory: Path, number: int) -> None:
        super().__init__(name="watch", daemon=True)
        self._directory = directory
        self._number = number
        self.seconds = 0.0
        self.has_seen_it = False

    def run(self) -> None:
        """Counts from now."""
        started = time.perf_counter()
        while not self.has_seen_it:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            with suppress(Damaged, OSError):
                self.has_seen_it = read_pointer(self._directory) == self._number
        self.seconds = time.perf_counter() - started


def _load(subject: Subject, number: int, seconds: dict[str, list[float]]) -> list[int]:
    """Loads the newest checkpoint into the model; gives the sizes of its files."""
    files = sorted(iteration_path(subject.directory, number).iterdir())
    on_rank_zero(lambda: _forget(files))
    tensors = subject.tensors()
    found: list[LoadedCheckpoint | None] = []
    seconds["verify"].append(_timed(lambda: found.append(find_latest(subject.directory))))
    checkpoint = found[0]
    assert checkpoint is not None
    assert checkpoint.iteration == number
    seconds["read"].append(_timed(lambda: load_tensors(checkpoint, tensors)))
    return [path.stat().st_size for path in files]


def _use_plain_files(directory: Path, size: int, seconds: dict[str, list[float]]) -> None:
    """Writes and reads so many bytes, by one stream of rank 0 and by all streams of all ranks."""
    rank, _ = rank_and_size()
    for name, mine, part in (
        ("one", int(rank == 0), size),
        ("many", file_threads(), size // _streams_of_all()),
    ):
        files = [directory / f"plain-{rank}-{number}" for number in range(mine)]
        seconds[f"write_{name}"].append(_timed(partial(_each, files, partial(_write, size=part))))
        _forget(files)
        seconds[f"read_{name}"].append(_timed(partial(_each, files, _read)))
        for file in files:
            file.unlink()


def _each(files: list[Path], work: Callable[[Path], None]) -> None:
    """Does the work with every file, all at once."""
    with ThreadPoolExecutor(max(1, len(files))) as pool:
        list(pool.map(work, files))


def _write(path: Path, size: int) -> None:
    """Writes bytes that no disk can pack, and waits until they are on it."""
    block = memoryview(os.urandom(min(_BLOCK, size)))
    with path.open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(block[:size])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def _forget(files: list[Path]) -> None:
    """Drops files that are on the disk from the system's cache, where it lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
