"""Megatron's token files, ``PREFIX.bin`` and ``PREFIX.idx``: a streaming writer, a reader.

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

import mmap
import os
import struct
import tempfile
import weakref
from bisect import bisect_left, bisect_right
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
        self._num_sequences = 0

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

        Raises:
            ValueError: the lengths are not those of the tokens, or a token does not fit the type.
        """
        if lengths is None:
            lengths = [tokens.size] if tokens.size else []
        sizes = np.asarray(lengths, dtype=np.int64)
        if sizes.size and (sizes.min() < 1 or sizes.max() > np.iinfo(np.int32).max):
            raise ValueError(f"sequence lengths must be 1 to 2**31 - 1, not {sizes}")
        if int(sizes.sum()) != tokens.size:
            raise ValueError(f"lengths add up to {sizes.sum()}, but there are {tokens.size}")
        limits = np.iinfo(self._dtype)
        if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
            raise ValueError(f"token {tokens.max()} does not fit into {self._dtype.name}")
        self._bin.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.write(sizes.astype("<i4").tobytes())
        self._num_sequences += sizes.size
        self._documents.write(np.array([self._num_sequences], dtype="<i8").tobytes())

    def _publish(self) -> None:
        part = _partial(idx_path(self._prefix))
        write_index(part, self._dtype, self._lengths, _read_back(self._documents, "<i8"))
        self._bin.flush()
        os.fsync(self._bin.fileno())
        _partial(bin_path(self._prefix)).replace(bin_path(self._prefix))
        part.replace(idx_path(self._prefix))
        sync_file(self._prefix.parent)


def write_index(
    path: Path,
    dtype: np.dtype[Any],
    lengths: IO[bytes],
    boundaries: Iterable[npt.NDArray[np.int64]] | None = None,
) -> None:
    """Writes an ``.idx`` in flat memory.

    Args:
        path: the file to write.
        dtype: type of the tokens.
        lengths: a file of the sequences' lengths, little-endian int32.
        boundaries: the first sequence of each document and the number of sequences, in pieces;
            None where each document is one sequence.
    """
    sequences = lengths.seek(0, os.SEEK_END) // 4
    pieces = boundaries or _ranges(sequences + 1)
    with path.open("wb") as index:
        index.write(_HEADER.pack(_MAGIC, _VERSION, _code_of(dtype), sequences, 0))
        for chunk in _read_back(lengths, "<i4"):
            index.write(chunk.tobytes())
        start = 0
        for chunk in _read_back(lengths, "<i4"):
            pointers = byte_pointers(chunk, dtype.itemsize, start)
            index.write(pointers.astype("<i8", copy=False).tobytes())
            start = int(pointers[-1]) + int(chunk[-1]) * dtype.itemsize
        first = index.tell()
        for chunk in pieces:
            index.write(chunk.astype("<i8", copy=False).tobytes())
        count = (index.tell() - first) // 8
        index.seek(0)
        index.write(_HEADER.pack(_MAGIC, _VERSION, _code_of(dtype), sequences, count))
        index.flush()
        os.fsync(index.fileno())


class IndexedDataset:
    """A pair of files, mapped read-only: opening takes the same time at any size.

    Attributes:
        prefix: the path of the pair without ``.bin`` and ``.idx``.
        dtype: type of the tokens, as the header says.
        tokens: all tokens in order, one flat array over the map; ``read`` for a few of them.
        sequence_lengths: int32 tokens of each sequence.
        sequence_pointers: int64 byte where each sequence begins.
        document_indices: int64 first sequence of each document, and the number of sequences.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        path = idx_path(prefix)
        for file in (path, bin_path(prefix)):
            if not file.is_file():
                raise UserError(
                    f"{file}: not there; of data/tokens the stage tokenize_corpus writes it, of "
                    "tokens made elsewhere name the pair by its path without .bin and .idx"
                )
        self._index = _map(path)
        # Binary search: what lies around an entry, which the kernel would read too (up to many MB
        # where its read-ahead is set high), is not wanted.
        _advise(self._index, mmap.MADV_RANDOM)
        index = np.frombuffer(self._index, dtype=np.uint8)
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
        self._file = os.open(bin_path(prefix), os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        data = _map(bin_path(prefix))
        self._check_ends(len(data))
        self.tokens: Tokens = np.frombuffer(data, dtype=self.dtype)

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
        if (
            end != bin_size
            or bin_size % self.dtype.itemsize
            or (n and int(self.sequence_pointers[0]) != 0)
        ):
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

    def read(self, first: int, last: int) -> Tokens:
        """The tokens at positions ``first`` to ``last`` - 1, which must exist: a copy.

        By one call of the system, since touching the map at a random place reads as much as the
        kernel's read-ahead: 14 ms instead of 0.02 ms a sample, where that was 8 MB.
        """
        tokens: Tokens = np.empty(last - first, dtype=self.dtype)
        left = tokens.view(np.uint8).data
        while left.nbytes:
            got = os.preadv(self._file, [left], last * self.dtype.itemsize - left.nbytes)
            if not got:
                raise UserError(f"{bin_path(self.prefix)}: was cut while it was in use")
            left = left[got:]
        return tokens

    def expect_scan(self) -> None:
        """Call it before reading the index's arrays from front to back: the kernel reads ahead."""
        _advise(self._index, mmap.MADV_SEQUENTIAL)

    def document_start(self, document: int) -> int:
        """Position in ``tokens`` where a document begins; ``num_tokens`` for ``num_documents``."""
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        sequence = int(self.document_indices[document])
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_edges(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """``document_start`` of the documents ``first`` to ``last``, both included."""
        end = self.document_start(last)
        sequences = self.document_indices[first : last + 1].astype(np.int64)
        pointers = self.sequence_pointers[sequences[0] : sequences[-1]].astype(np.int64)
        return np.append(pointers // self.dtype.itemsize, end)[sequences - sequences[0]]

    def document_at(self, position: int) -> int:
        """The document that holds the token at ``position``, by binary search."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"token {position} of {self.num_tokens}")
        # bisect reads a handful of entries; np.searchsorted would copy the whole array first,
        # since the arrays of an .idx lie at odd addresses.
        sequence = bisect_right(self.sequence_pointers, position * self.dtype.itemsize) - 1
        return bisect_right(self.document_indices, sequence) - 1

    def document_starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Positions p, ``first`` < p < ``last``, at which a document begins: int64, rising.

        A document without tokens begins nowhere. Any ``first`` and ``last`` will do: a negative
        ``first`` includes position 0.
        """
        itemsize = self.dtype.itemsize
        low = bisect_right(self.sequence_pointers, first * itemsize)
        high = bisect_left(self.sequence_pointers, min(last, self.num_tokens) * itemsize)
        documents = slice(
            bisect_left(self.document_indices, low), bisect_left(self.document_indices, high)
        )
        # The slice of pointers is copied before it is indexed: see document_at.
        pointers = self.sequence_pointers[low:high].astype(np.int64)
        return np.unique(pointers[self.document_indices[documents] - low] // itemsize)


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, name in _DTYPES.items():
        if np.dtype(name) == dtype:
            return code
    raise ValueError(f"tokens must be integers of the format, not {dtype}")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _ranges(end: int) -> Iterator[npt.NDArray[np.int64]]:
    """The whole numbers below ``end``, in pieces."""
    for first in range(0, end, _CHUNK):
        yield np.arange(first, min(first + _CHUNK, end), dtype=np.int64)


def _read_back(file: IO[bytes], dtype: str) -> Iterator[npt.NDArray[Any]]:
    file.seek(0)
    while data := file.read(_CHUNK * np.dtype(dtype).itemsize):
        yield np.frombuffer(data, dtype=dtype)


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _advise(mapped: mmap.mmap | bytes, advice: int) -> None:
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(advice)


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
