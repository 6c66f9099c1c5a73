"""Compressed files: every cut is an error; lines end at line feeds only."""

import gzip
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lib.data.compressed import lines_of, read_pieces
from lib.errors import UserError

TEXT = b"".join(b"line %d\n" % number for number in range(30_000))


def compressed(suffix: str, data: bytes = TEXT) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_frames_after_one_another_are_one_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(compressed(suffix) + compressed(suffix, b"more\n"))
    assert b"".join(read_pieces(path, "a")) == TEXT + b"more\n"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.999])
def test_cut_file_is_an_error(tmp_path: Path, suffix: str, kept: float) -> None:
    data = compressed(suffix)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(UserError, match="its name: the compressed file ends too soon"):
        list(read_pieces(path, "its name"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_second_frame_cut_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(compressed(suffix) + compressed(suffix)[:-1])
    with pytest.raises(UserError, match="ends too soon"):
        list(read_pieces(path, "a"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["plain text", "trailing", "flipped"])
def test_damaged_file_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    data = bytearray(compressed(suffix))
    data[len(data) // 2] ^= 0xFF
    contents = {
        "plain text": TEXT,
        "trailing": compressed(suffix) + b"trailing rubbish",
        "flipped": bytes(data) if suffix == ".gz" else b"\x28\xb5\x2f\xfd" + b"\xff" * 100,
    }
    path = tmp_path / f"a{suffix}"
    path.write_bytes(contents[damage])
    with pytest.raises(UserError, match="damaged"):
        list(read_pieces(path, "a"))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read_pieces(tmp_path / "none", "none"))


@given(st.binary(max_size=40).map(lambda data: data.replace(b"\x00", b"\n")), st.integers(1, 7))
def test_lines_do_not_depend_on_where_pieces_end(data: bytes, size: int) -> None:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    assert list(lines_of(pieces)) == lines
