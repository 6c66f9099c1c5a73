"""Megatron's token files, ``PREFIX.bin`` and ``PREFIX.idx``: a streaming writer, a mapped reader.

``.bin`` holds the tokens back to back, nothing else. ``.idx``, little-endian::

    bytes              what
    9                  the letters MMIDIDX and two zeros
    8  uint64          version, 1
    1  uint8           code of the tokens' type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16)
    8  uint64          N, sequences
    8  uint64          D + 1, for D documents
    4 N      int32     length of each sequence in tokens
    8 N      int64     where each sequence begins in .bin, in bytes
    8 (D+1)  int64     the first sequence of each document, and N at the end

A document is usually one sequence. Lengths are 32 bits in the format; every sum of them here is
64 bits. The reader believes the type in the header and nothing else: what a vocabulary's size
would suggest differs between writers.
"""

import os
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from lib.atomic import PARTIAL_SUFFIX, sync_file
from lib.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_UINT16_LIMIT = 65500
# Lengths and tokens are copied in pieces of so many items, so that memory stays flat.
_CHUNK = 1 << 20

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """The type Megatron's writer gives to ids 0..vocab_size-1: uint16 below 65500, else int32."""
    return np.dtype("<u2" if vocab_size < _MEGATRON_UINT16_LIMIT else "<i4")


def bin_path(prefix: Path) -> Path:
    """``PREFIX.bin``."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """``PREFIX.idx``."""
    return prefix.with_name(prefix.name + ".idx")


def byte_pointers(
    lengths: npt.NDArray[np.int32], itemsize: int, start: int = 0
) -> npt.NDArray[np.int64]:
    """Where each sequence begins in .bin, in bytes; the first one at ``start``."""
    ends = np.cumsum(lengths, dtype=np.int64) * np.int64(itemsize) + np.int64(start)
    return np.concatenate((np.array([start], dtype=np.int64), ends[:-1]))[: len(lengths)]


class IndexedDatasetWriter:
    """Writes a pair of files as a stream, in flat memory, and publishes it whole.

    Use as a context manager; tokens go to ``PREFIX.bin.partial`` and both files get their names,
    the index last, when the block ends well. When it raises, nothing is left.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike) -> None:
        self._prefix = prefix
        self._code = _code_of(np.dtype(dtype).newbyteorder("<"))
        self._dtype: np.dtype[Any] = np.dtype(_DTYPES[self._code])
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        folder = self._prefix.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._bin = _partial(bin_path(self._prefix)).open("wb")
        # Nameless files: they vanish with the process, however it ends.
        self._lengths: IO[bytes] = tempfile.TemporaryFile(dir=folder)
        self._documents: IO[bytes] = tempfile.TemporaryFile(dir=folder)
        self._documents.write(np.zeros(1, dtype="<i8").tobytes())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        parts = [_partial(bin_path(self._prefix)), _partial(idx_path(self._prefix))]
        try:
            if kind is None:
                self._publish()
        finally:
            for file in (self._bin, self._lengths, self._documents):
                file.close()
            for part in parts:
                part.unlink(missing_ok=True)

    def add_document(self, tokens: Tokens, lengths: Sequence[int] | None = None) -> None:
        """Adds one document.

        Args:
            tokens: all its tokens.
            lengths: tokens of each of its sequences; by default it is one sequence. An empty
                document has none: it leaves a boundary in the index, never a sequence of length 0.
        """
        if lengths is None:
            lengths = [tokens.size] if tokens.size else []
        self._add(tokens, np.asarray(lengths, dtype=np.int64))
        self._end_documents([self.num_sequences])

    def add_documents(self, tokens: Tokens, lengths: npt.NDArray[np.integer[Any]]) -> None:
        """Adds many documents of one sequence each, their tokens back to back."""
        first = self.num_sequences
        self._add(tokens, lengths.astype(np.int64))
        self._end_documents(range(first + 1, self.num_sequences + 1))

    def add_dataset(self, other: "IndexedDataset") -> None:
        """Appends another pair: the result is what writing both in one go would have given."""
        if other.dtype != self._dtype:
            raise UserError(
                f"{other.prefix}: its tokens are {other.dtype.name}, those of {self._prefix} "
                f"{self._dtype.name}; tokenise both with the same tokenizer"
            )
        first = self.num_sequences
        for chunk in _chunks(other.tokens):
            self._bin.write(chunk.tobytes())
        for chunk in _chunks(other.sequence_lengths):
            self._lengths.write(chunk.tobytes())
        self.num_tokens += other.num_tokens
        self.num_sequences += len(other)
        for chunk in _chunks(other.document_indices[1:]):
            self._end_documents(chunk + np.int64(first))

    def _add(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        if lengths.size and (lengths.min() < 1 or lengths.max() > np.iinfo(np.int32).max):
            raise ValueError(f"sequence lengths must be 1 to 2**31 - 1, not {lengths}")
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths add up to {lengths.sum()}, but there are {tokens.size}")
        limits = np.iinfo(self._dtype)
        if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
            raise ValueError(f"token {tokens.max()} does not fit into {self._dtype.name}")
        self._bin.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.num_sequences += lengths.size
        self.num_tokens += tokens.size

    def _end_documents(self, ends: Iterable[int]) -> None:
        boundaries = np.asarray(ends, dtype="<i8")
        self._documents.write(boundaries.tobytes())
        self.num_documents += boundaries.size

    def _publish(self) -> None:
        part = _partial(idx_path(self._prefix))
        with part.open("wb") as index:
            index.write(
                _HEADER.pack(
                    _MAGIC, _VERSION, self._code, self.num_sequences, self.num_documents + 1
                )
            )
            for chunk in _read_back(self._lengths, "<i4"):
                index.write(chunk.tobytes())
            start = 0
            for chunk in _read_back(self._lengths, "<i4"):
                pointers = byte_pointers(chunk, self._dtype.itemsize, start)
                index.write(pointers.astype("<i8", copy=False).tobytes())
                start = int(pointers[-1]) + int(chunk[-1]) * self._dtype.itemsize
            for chunk in _read_back(self._documents, "<i8"):
                index.write(chunk.tobytes())
            index.flush()
            os.fsync(index.fileno())
        self._bin.flush()
        os.fsync(self._bin.fileno())
        _partial(bin_path(self._prefix)).replace(bin_path(self._prefix))
        part.replace(idx_path(self._prefix))
        sync_file(self._prefix.parent)


class IndexedDataset:
    """A pair of files, mapped read-only: opening takes the same time at any size.

    Attributes:
        prefix: the path of the pair without ``.bin`` and ``.idx``.
        dtype: type of the tokens, as the header says.
        tokens: all tokens in order, one flat array over the map.
        sequence_lengths: int32 tokens of each sequence.
        sequence_pointers: int64 byte where each sequence begins.
        document_indices: int64 first sequence of each document, and the number of sequences.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        path = idx_path(prefix)
        for file in (path, bin_path(prefix)):
            if not file.is_file():
                raise UserError(f"{file}: not there; the tokenize_corpus stage writes it")
        index = _map(path)
        self.dtype, self._num_sequences, boundaries = _read_header(path, index)
        n, offset = self._num_sequences, _HEADER.size
        modes = index.size - (offset + 12 * n + 8 * boundaries)
        if modes not in (0, n):
            raise UserError(
                f"{path}: {index.size} bytes, but {n} sequences and {boundaries - 1} documents "
                f"take {index.size - modes}; the file is cut or damaged, write it again"
            )
        self.sequence_lengths = _view(index, "<i4", n, offset)
        self.sequence_pointers = _view(index, "<i8", n, offset + 4 * n)
        self.document_indices = _view(index, "<i8", boundaries, offset + 12 * n)
        data = _map(bin_path(prefix))
        self._check_ends(data.size)
        self.tokens: Tokens = data.view(self.dtype)

    def _check_ends(self, bin_size: int) -> None:
        """The cheap checks that catch a cut file or a pair whose halves do not belong together."""
        n = self._num_sequences
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if (first, last) != (0, n):
            raise UserError(
                f"{idx_path(self.prefix)}: documents run from sequence {first} to {last} instead "
                f"of 0 to {n}; the file is damaged, write it again"
            )
        end = 0
        if n:
            end = int(self.sequence_pointers[-1])
            end += int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if end != bin_size or (n and int(self.sequence_pointers[0]) != 0):
            raise UserError(
                f"{bin_path(self.prefix)}: {bin_size} bytes, but its .idx describes {end}; "
                "one of the two was cut or belongs to another run, write both again"
            )

    def __len__(self) -> int:
        """The number of sequences."""
        return self._num_sequences

    def __getitem__(self, index: int) -> Tokens:
        """The tokens of a sequence: a view of the map, not a copy."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[index])]

    @property
    def num_documents(self) -> int:
        """The number of documents, empty ones included."""
        return self.document_indices.size - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.tokens.size

    def document_start(self, document: int) -> int:
        """Position in ``tokens`` where a document begins; ``num_tokens`` for ``num_documents``."""
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        sequence = int(self.document_indices[document])
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_at(self, position: int) -> int:
        """The document that holds the token at ``position``, by binary search."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"token {position} of {self.num_tokens}")
        # bisect reads a handful of entries; np.searchsorted would copy the whole array first,
        # since the arrays of an .idx lie at odd addresses.
        sequence = bisect_right(self.sequence_pointers, position * self.dtype.itemsize) - 1
        return bisect_right(self.document_indices, sequence) - 1

    def verify(self) -> None:
        """Reads the whole index and checks each entry, which opening leaves out.

        Raises:
            UserError: naming the file, where pointers are not the sums of the lengths, a length
                is below 1, or documents go backwards.
        """
        start = 0
        for first in range(0, len(self), _CHUNK):
            lengths = np.array(self.sequence_lengths[first : first + _CHUNK])
            pointers = byte_pointers(lengths, self.dtype.itemsize, start)
            found = self.sequence_pointers[first : first + _CHUNK]
            if lengths.min() < 1 or not np.array_equal(pointers, found):
                raise UserError(
                    f"{idx_path(self.prefix)}: pointers and lengths disagree in sequences "
                    f"{first} to {first + lengths.size - 1}; the file is damaged, write it again"
                )
            start = int(pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize
        for first in range(0, self.num_documents, _CHUNK):
            if np.any(np.diff(self.document_indices[first : first + _CHUNK + 1]) < 0):
                raise UserError(
                    f"{idx_path(self.prefix)}: documents are not in order near document {first}; "
                    "the file is damaged, write it again"
                )


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, name in _DTYPES.items():
        if np.dtype(name) == dtype:
            return code
    raise ValueError(f"tokens must be integers of the format, not {dtype}")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _chunks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for first in range(0, array.size, _CHUNK):
        yield array[first : first + _CHUNK]


def _read_back(file: IO[bytes], dtype: str) -> Iterator[npt.NDArray[Any]]:
    file.seek(0)
    while data := file.read(_CHUNK * np.dtype(dtype).itemsize):
        yield np.frombuffer(data, dtype=dtype)


def _map(path: Path) -> npt.NDArray[np.uint8]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.uint8)
    # A plain array over the map: numpy's memmap class costs microseconds at every slice.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _view(buffer: npt.NDArray[np.uint8], dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
    return np.frombuffer(buffer, dtype=dtype, count=count, offset=offset)


def _read_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """The tokens' type, N and D + 1."""
    if index.size < _HEADER.size:
        raise UserError(f"{path}: {index.size} bytes are no index; write it again")
    magic, version, code, sequences, boundaries = _HEADER.unpack(index[: _HEADER.size].tobytes())
    if magic != _MAGIC or version != _VERSION:
        raise UserError(
            f"{path}: begins with {magic!r}, version {version}, instead of {_MAGIC!r}, version "
            f"{_VERSION}; it is no Megatron index"
        )
    if code not in _DTYPES:
        raise UserError(f"{path}: token type code {code} is not one of {sorted(_DTYPES)}")
    if boundaries < 1:
        raise UserError(f"{path}: has no document boundaries; the file is damaged, write it again")
    return np.dtype(_DTYPES[code]), sequences, boundaries
