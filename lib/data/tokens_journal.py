"""Files that grow, and a journal of how far they are good: what a killed run leaves to the next.

After each shard of the raw corpus a line is added to the journal: the size and checksum of each
file so far, and what was counted. The next run with the same key reads the files back, goes on
after the last line whose checksums they have, and cuts off what lies beyond. So neither a kill in
the middle of a write nor what a power cut took from the disk gets into the result.
"""

import fcntl
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from lib.data.frame_encoding import Counts
from lib.errors import UserError

JOURNAL_FILE = "journal.jsonl"
_CHUNK = 1 << 22

Model = TypeVar("Model", bound=BaseModel)


class JournalKey(BaseModel):
    """What decides the bytes: work under another key is begun anew."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    """Version of the journal and of what it describes."""
    corpus_sha256: str
    """Checksum of the raw corpus."""
    tokenizer_fingerprint: str
    """Fingerprint of the tokenizer."""
    eod_id: int
    """Id of its end-of-document token, which the fingerprint does not cover."""
    options: dict[str, Any]
    """Section tokens of the parameters, without what cannot change the result."""
    part: str
    """Which part of the corpus, such as 00-of-01."""


class Mark(BaseModel):
    """The state of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    """Its size."""
    sha256: str
    """Checksum of so many bytes from its beginning."""


class JournalEntry(BaseModel):
    """The state after a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shards: int
    """Shards done."""
    counts: Counts
    """What they held."""
    files: dict[str, Mark]
    """State of each file."""


class Journal:
    """The files of one piece of work, open for going on with it. Use as a context manager.

    Attributes:
        shards: shards that are done.
        counts: what they held.
    """

    def __init__(self, folder: Path, key: JournalKey, files: Mapping[str, Path]) -> None:
        """Takes the journal's folder, the key, and the path of each file by a name."""
        self._path = folder / JOURNAL_FILE
        self._key = key
        self._paths = files
        self.shards = 0
        self.counts = Counts()

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._journal = self._path.open("a+b")
        try:
            self._lock()
            self._files = {name: _GrowingFile(path) for name, path in self._paths.items()}
            self._resume()
        except BaseException:
            self._journal.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()
        self._journal.close()

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Adds an array's bytes to a file; they count once ``end_shard`` has been called."""
        self._files[name].write(np.ascontiguousarray(array).view(np.uint8).data)

    def end_shard(self, counts: Counts) -> None:
        """Records that all files are good up to here.

        Args:
            counts: of the shard.
        """
        self.shards += 1
        self.counts.add(counts)
        self._put(JournalEntry(shards=self.shards, counts=self.counts, files=self.marks()))

    def marks(self) -> dict[str, Mark]:
        """The state of each file, by name."""
        return {name: file.mark() for name, file in self._files.items()}

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self._path.parent}: another process works on this; wait for it or end it"
            ) from None
        except OSError:
            return  # a file system without locks: nothing tells of another process

    def _resume(self) -> None:
        self._journal.seek(0)
        lines = self._journal.read().split(b"\n")[:-1]  # without a line that was cut short
        good = 0
        if lines and _parse(JournalKey, lines[0]) == self._key:
            good = 1
            for line in lines[1:]:
                entry = _parse(JournalEntry, line)
                if entry is None or not self._reaches(entry):
                    break
                self.shards, self.counts = entry.shards, entry.counts
                good += 1
        for file in self._files.values():
            file.cut()
        self._journal.truncate(sum(len(line) + 1 for line in lines[:good]))
        if not good:
            self._put(self._key)

    def _reaches(self, entry: JournalEntry) -> bool:
        """Whether the files are what an entry says; if they are, they then stand there."""
        if entry.files.keys() != self._files.keys():
            return False
        found = {name: self._files[name].digest_at(mark) for name, mark in entry.files.items()}
        if any(found[name].hexdigest() != mark.sha256 for name, mark in entry.files.items()):
            return False
        for name, mark in entry.files.items():
            self._files[name].stand_at(mark.bytes, found[name])
        return True

    def _put(self, line: BaseModel) -> None:
        self._journal.write(line.model_dump_json().encode() + b"\n")
        self._journal.flush()


class _GrowingFile:
    """A file, its good bytes and their checksum."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = path.open("r+b", buffering=_CHUNK)
        self._bytes = 0
        self._digest = hashlib.sha256()

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def mark(self) -> Mark:
        self._file.flush()
        return Mark(bytes=self._bytes, sha256=self._digest.hexdigest())

    def digest_at(self, mark: Mark) -> "hashlib._Hash":
        """The checksum up to a mark beyond the good bytes, or up to the end of the file."""
        self._file.seek(self._bytes)
        digest = self._digest.copy()
        left = mark.bytes - self._bytes
        while left > 0 and (chunk := self._file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        return digest

    def stand_at(self, size: int, digest: "hashlib._Hash") -> None:
        self._bytes, self._digest = size, digest

    def cut(self) -> None:
        """Cuts off what is not known to be good."""
        self._file.seek(self._bytes)
        self._file.truncate()

    def close(self) -> None:
        self._file.close()


def _parse(model: type[Model], line: bytes) -> Model | None:
    try:
        return model.model_validate_json(line)
    except ValidationError:
        return None
