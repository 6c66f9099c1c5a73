"""Where tokens are written until they are whole, in one part or many, and how parts become one.

Beside the output ``NAME`` stands ``NAME.partial`` while there is work in progress::

    out/                      what becomes NAME: the .bin and .idx of all parts
    00-of-04/journal.jsonl    how far part 0 of 4 is good, see lib/data/tokens_journal.py
    00-of-04/lengths          int32 tokens of each of its documents: what its .idx is made from
    00-of-04/left_out         int64 numbers of the raw documents that gave none
    00-of-04/part.json        written last: the part is finished

A part takes a range of the raw corpus's shards. Parts may be written by several machines at once;
whoever joins them writes the manifest and renames ``out``. Nothing is copied.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from lib.atomic import PARTIAL_SUFFIX, publish_directory, sha256_of, write_text_atomically
from lib.data.frame_encoding import Counts, Encoded
from lib.data.indexed_dataset import bin_path, idx_path, write_index
from lib.data.manifest import RawManifest, Shard
from lib.data.tokens_journal import Journal, JournalKey
from lib.data.tokens_manifest import LEFT_OUT_FILE, TOKENS_PREFIX, TokensPart
from lib.errors import UserError

RECORD_FILE = "part.json"
_NAME = re.compile(r"(\d+)-of-(\d+)")
_OPTION = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Part:
    """Part ``index`` (from 0) of a corpus cut into ``count`` parts."""

    count: int
    index: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``i/n``, such as 0/4 for the first of four parts.

        Raises:
            UserError: when it is no such part.
        """
        found = _OPTION.fullmatch(text)
        if found is None or int(found[1]) >= int(found[2]):
            raise UserError(
                f"--shard {text}: must be i/n with i from 0 to n - 1; write 0/4 for the first of "
                "four parts"
            )
        return cls(int(found[2]), int(found[1]))

    @property
    def name(self) -> str:
        """Such as ``00-of-04``."""
        return f"{self.index:02d}-of-{self.count:02d}"

    @property
    def prefix(self) -> str:
        """The pair's name without its endings."""
        return TOKENS_PREFIX if self.count == 1 else f"{TOKENS_PREFIX}_{self.name}"

    def all_of_count(self) -> "tuple[Part, ...]":
        """The parts that make up the corpus, this one among them."""
        return tuple(Part(self.count, index) for index in range(self.count))

    def cut(self, raw: RawManifest) -> tuple[tuple[Shard, ...], int]:
        """The shards of the raw corpus that this part takes, and the documents before them.

        Raises:
            UserError: when there are fewer shards than parts.
        """
        if self.count > len(raw.shards):
            raise UserError(
                f"--shard {self.index}/{self.count}: the corpus has only {len(raw.shards)} shards, "
                "and a part takes whole ones; use fewer parts, or a smaller shard_megabytes"
            )
        first, last = (
            len(raw.shards) * edge // self.count for edge in (self.index, self.index + 1)
        )
        before = sum(shard.documents for shard in raw.shards[:first])
        return raw.shards[first:last], before


class PartRecord(BaseModel):
    """A finished part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: JournalKey
    """What decided its bytes."""
    dtype: str
    """Type of the tokens."""
    part: TokensPart
    """Its pair of files."""
    counts: Counts
    """What became of its documents."""


@dataclass(frozen=True)
class Workplace:
    """The folder beside an output in which it is written."""

    output: Path

    @property
    def root(self) -> Path:
        """All of the work in progress."""
        return self.output.with_name(self.output.name + PARTIAL_SUFFIX)

    @property
    def out(self) -> Path:
        """What becomes the output."""
        return self.root / "out"

    def folder(self, part: Part) -> Path:
        """What a part needs beside its files in ``out``."""
        return self.root / part.name

    def parts(self) -> list[Part]:
        """The parts that were begun, in any order."""
        names = [_NAME.fullmatch(path.name) for path in self.root.glob("*-of-*")]
        return [Part(int(name[2]), int(name[1])) for name in names if name]

    def finished(self, part: Part, key: JournalKey) -> PartRecord | None:
        """The record of a part if it is finished, under this key, and its files are there."""
        try:
            text = (self.folder(part) / RECORD_FILE).read_text(encoding="utf-8")
            record = PartRecord.model_validate_json(text)
        except (OSError, ValidationError):
            return None
        prefix = self.out / part.prefix
        size = record.part.tokens * np.dtype(record.dtype).itemsize
        whole = (
            idx_path(prefix).is_file()
            and bin_path(prefix).is_file()
            and bin_path(prefix).stat().st_size == size
        )
        return record if whole and record.key == key else None

    def publish(self, parts: Sequence[Part]) -> None:
        """Makes the finished parts the output; their manifest is in ``out`` already."""
        self._write_left_out(parts)
        wanted = {part.prefix for part in parts}
        for path in self.out.iterdir():
            if path.suffix in (".bin", ".idx") and path.stem not in wanted:
                path.unlink()
        publish_directory(self.out, self.output)
        shutil.rmtree(self.root)

    def _write_left_out(self, parts: Sequence[Part]) -> None:
        """The parts' numbers of documents, one after the other, as numpy's file."""
        sources = [self.folder(part) / _LEFT_OUT for part in parts]
        count = sum(path.stat().st_size for path in sources) // 8
        with (self.out / LEFT_OUT_FILE).open("wb") as target:
            header = {"descr": "<i8", "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(target, header)
            for path in sources:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target)


_TOKENS = "tokens"
_LENGTHS = "lengths"
_LEFT_OUT = "left_out"


class PartWriter:
    """Writes a part, or goes on with one that was begun. Use as a context manager."""

    def __init__(self, place: Workplace, part: Part, key: JournalKey, dtype: np.dtype[Any]) -> None:
        self._part = part
        self._key = key
        self._dtype = dtype
        self._prefix = place.out / part.prefix
        self._folder = place.folder(part)
        files = {
            _TOKENS: bin_path(self._prefix),
            _LENGTHS: self._folder / _LENGTHS,
            _LEFT_OUT: self._folder / _LEFT_OUT,
        }
        self._journal = Journal(self._folder, key, files)
        self._counts = Counts()

    def __enter__(self) -> Self:
        self._journal.__enter__()
        (self._folder / RECORD_FILE).unlink(missing_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._journal.__exit__(kind, error, traceback)

    @property
    def done(self) -> tuple[int, Counts]:
        """Shards that are done, and what they held."""
        return self._journal.shards, self._journal.counts

    def add(self, encoded: Encoded, first_document: int) -> None:
        """Adds a frame; ``first_document`` is the number of its first one in the raw corpus."""
        self._journal.write(_TOKENS, encoded.tokens.astype(self._dtype, copy=False))
        self._journal.write(_LENGTHS, encoded.lengths.astype("<i4", copy=False))
        left_out = encoded.left_out + np.int64(first_document)
        self._journal.write(_LEFT_OUT, left_out.astype("<i8", copy=False))
        self._counts.add(encoded.counts)

    def end_shard(self) -> None:
        """Records that the shard is whole: a later run goes on from here."""
        self._journal.end_shard(self._counts)
        self._counts = Counts()

    def finish(self) -> PartRecord:
        """Writes the index and the record, once all shards are in."""
        marks = self._journal.marks()
        with (self._folder / _LENGTHS).open("rb") as lengths:
            write_index(idx_path(self._prefix), self._dtype, lengths)
        counts = self._journal.counts
        record = PartRecord(
            key=self._key,
            dtype=self._dtype.name,
            part=TokensPart(
                prefix=self._part.prefix,
                documents=counts.kept,
                tokens=counts.tokens,
                bin_sha256=marks[_TOKENS].sha256,
                idx_sha256=sha256_of(idx_path(self._prefix)),
            ),
            counts=counts,
        )
        write_text_atomically(self._folder / RECORD_FILE, record.model_dump_json(indent=2) + "\n")
        return record
