"""Plain, gzip and zstd files read as pieces of bytes; a cut-short file is an error, not an end."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import zstandard

from lib.errors import UserError

_PIECE = 1 << 20
# Input given to the zstd decompressor at a time. Little, because all that it expands to is held:
# text that repeats itself expands ten thousand times.
_ZSTD_INPUT = 1 << 13


class TruncatedError(Exception):
    """Compressed data that ends before it is complete."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def pieces_of(file: _Readable, size: int) -> Iterator[bytes]:
    """What is left of a file, ``size`` bytes at a time."""
    while piece := file.read(size):
        yield piece


def unzstd(compressed: Iterable[bytes]) -> Iterator[bytes]:
    """The decompressed pieces of a zstd stream of one or more frames.

    ``zstandard``'s own ``stream_reader`` takes the end of a cut-short stream for the end of the
    data, hence this loop.

    Raises:
        TruncatedError: if the stream ends within a frame, or is empty.
    """
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    whole = False
    for piece in compressed:
        rest = piece
        while rest:
            yield frame.decompress(rest)
            whole = frame.eof
            rest = b""
            if whole:
                rest = frame.unused_data
                frame = decompressor.decompressobj()
    if not whole:
        raise TruncatedError


def _ungzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        if path.stat().st_size == 0:
            raise TruncatedError
        yield from pieces_of(file, _PIECE)


def read_pieces(path: Path, label: str) -> Iterator[bytes]:
    """A file's bytes, decompressed as its ending (.gz, .zst) says.

    Args:
        path: the file.
        label: what errors call it.

    Raises:
        UserError: if the file cannot be read, is damaged, or ends too soon; raised where the fault
            is met, which may be at the last byte.
    """
    try:
        if path.suffix == ".gz":
            yield from _ungzip(path)
            return
        with path.open("rb") as file:
            if path.suffix == ".zst":
                yield from unzstd(pieces_of(file, _ZSTD_INPUT))
            else:
                yield from pieces_of(file, _PIECE)
    except (EOFError, TruncatedError):
        raise UserError(
            f"{label}: the compressed file ends too soon, it was cut short; fetch or copy it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(
            f"{label}: damaged, or not compressed as its ending {path.suffix} says ({error}); "
            "fetch or copy it again, or rename it"
        ) from error
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror}); check the file") from error


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their line feeds; a last line needs none.

    Only line feeds end a line: a Unicode line separator inside a text divides nothing.
    """
    begun: list[bytes] = []  # the pieces of a line that has not ended yet
    for piece in pieces:
        first, *others = piece.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            begun = [others.pop()]
            yield from others
    last = b"".join(begun)
    if last:
        yield last
