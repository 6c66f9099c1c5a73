"""Outputs appear whole or not at all: write beside, sync, rename.

A reader (another stage, a resumed run, DVC) sees either the old file or the new one, also after
a kill or a power cut in the middle. Stages never edit an output in place: it may be a hard link
into DVC's cache, and writing through the link would change the cached copy.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
_CHUNK = 1 << 22


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, as hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Forces a file's, or a folder's, contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``: all of it or, on any failure, none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_file(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in UTF-8: all of it or, on any failure, none."""
    write_bytes_atomically(path, text.encode())


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Gives an empty folder beside ``path`` that becomes ``path`` when the block ends well.

    A folder already at ``path`` is replaced. When the block raises, the new folder is removed and
    the old one stands.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_folder(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _replace_folder(partial, path)


def publish_directory(partial: Path, path: Path) -> None:
    """Makes a finished folder ``path`` once all of it is on the disk; replaces one there."""
    _sync_folder(partial)
    _replace_folder(partial, path)


def _sync_folder(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        sync_file(file)
    sync_file(folder)


def _replace_folder(partial: Path, path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    sync_file(path.parent)
