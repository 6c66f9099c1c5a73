"""Documents in keyed-hash order, whatever the size of the corpus.

A document's place is the rank of ``blake2b(text, key=seed)``, ties (equal texts) in the source's
order. So the order is that of a fair shuffle, and depends on the texts and the seed alone, neither
on how files are listed or named nor on how many shards there are.

Sorting is external, in two passes. The first appends each document to one of 256 files by the
first byte of its hash. The second takes the files in turn, sorts one file's hashes in memory and
reads its documents in that order. Held in memory are one document, and about 110 bytes for each
document of one file: 0.4 bytes for each document of the corpus, 43 MB for 100 million.

Equal texts have equal hashes and so come out side by side: leaving out duplicates takes no memory
beyond that.
"""

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lib.data.documents import RawDocument, to_json_line

_BUCKETS = 256
_BUFFER = 1 << 16
_DIGEST_BYTES = 16
# Sort key (digest, then position in the source, so that ties keep its order), bytes of text,
# bytes of the stored line. Big-endian, so that keys compare as bytes.
_KEY = struct.Struct(f">{_DIGEST_BYTES}sQ")
_HEADER = struct.Struct(f">{_KEY.size}sQQ")
# A header and where its line begins in the file.
_ENTRY = struct.Struct(f">{_HEADER.size}sQ")
# Calls to ``advance`` cost more than the work on a short document; they come in hundreds.
_PER_ADVANCE = 200


class EncodedDocument(NamedTuple):
    """A document as its JSON line, and the size of its text in UTF-8."""

    line: bytes
    text_bytes: int


def scatter(
    documents: Iterable[RawDocument], seed: int, folder: Path, advance: Callable[[int], None]
) -> int:
    """First pass: appends each document to the bucket file of its hash.

    Args:
        documents: the corpus, in its source's order.
        seed: key of the hash.
        folder: an empty folder for the buckets.
        advance: called with numbers of documents done.

    Returns:
        The number of documents.
    """
    hash_key = str(seed).encode()
    position = 0
    with contextlib.ExitStack() as stack:
        buckets: dict[int, BinaryIO] = {}  # opened when first needed: a small corpus needs few
        for document in documents:
            text = document.text.encode()
            digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=hash_key).digest()
            line = to_json_line(document)
            bucket = buckets.get(digest[0])
            if bucket is None:
                path = _bucket_path(folder, digest[0])
                bucket = stack.enter_context(path.open("wb", buffering=_BUFFER))
                buckets[digest[0]] = bucket
            bucket.write(_HEADER.pack(_KEY.pack(digest, position), len(text), len(line)))
            bucket.write(line)
            position += 1
            if position % _PER_ADVANCE == 0:
                advance(_PER_ADVANCE)
    advance(position % _PER_ADVANCE)
    return position


def gather(
    folder: Path,
    advance: Callable[[int], None],
    leave_out_duplicate: Callable[[], None] | None = None,
) -> Iterator[EncodedDocument]:
    """Second pass: all documents in order; each bucket file is removed once it is read.

    Args:
        folder: the folder that ``scatter`` filled.
        advance: called with numbers of documents done.
        leave_out_duplicate: called for each document whose text an earlier one of the source had,
            which is then left out; None keeps them all. Equal means equal in all 128 bits of the
            hash.
    """
    done = 0
    for number in range(_BUCKETS):
        path = _bucket_path(folder, number)
        if not path.exists():
            continue
        previous = b""
        for digest, document in _sorted_bucket(path):
            if digest != previous or leave_out_duplicate is None:
                yield document
            else:
                leave_out_duplicate()
            previous = digest
            done += 1
            if done % _PER_ADVANCE == 0:
                advance(_PER_ADVANCE)
        path.unlink()
    advance(done % _PER_ADVANCE)


def _bucket_path(folder: Path, number: int) -> Path:
    return folder / f"bucket-{number:03d}"


def _sorted_bucket(path: Path) -> Iterator[tuple[bytes, EncodedDocument]]:
    """The documents of a bucket in order, each after its digest."""
    with path.open("rb", buffering=_BUFFER) as file:
        # Packed, since tuples would take more than twice the memory. They compare by their keys,
        # with which they begin and of which no two are equal.
        entries: list[bytes] = []
        while header := file.read(_HEADER.size):
            start = file.tell()
            entries.append(_ENTRY.pack(header, start))
            file.seek(start + _HEADER.unpack(header)[2])
        entries.sort()
        for entry in entries:
            header, start = _ENTRY.unpack(entry)
            key, text_bytes, line_bytes = _HEADER.unpack(header)
            file.seek(start)
            line = file.read(line_bytes)
            yield key[:_DIGEST_BYTES], EncodedDocument(line, text_bytes)
