"""The shards of the raw corpus, written and read: JSON lines, compressed with zstd.

A shard is a sequence of zstd frames of about a megabyte of text, each compressed by itself. A
document never crosses from one frame into another, so that any frame can be read alone.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard
from pydantic_core import from_json

from lib.data.compressed import TruncatedError, lines_of, pieces_of, unzstd
from lib.data.documents import RawDocument, from_json_line
from lib.data.manifest import Shard, check_sha256, check_size, read_manifest, remedy
from lib.data.shuffle import EncodedDocument
from lib.errors import UserError

# zstd's default: faster than JSON is encoded here, and within a tenth of the size of level 9.
_LEVEL = 3
# Text per frame: enough that frames cost 1 % in size, little enough that the processes which
# tokenise them finish together.
_FRAME_BYTES = 1 << 20
_BUFFER = 1 << 20
_READ = 1 << 16


def write_shards(
    documents: Iterable[EncodedDocument], folder: Path, shard_bytes: int
) -> tuple[Shard, ...]:
    """Writes documents, in the order given, to ``corpus-00000.jsonl.zst`` and so on.

    Args:
        documents: the corpus in its final order.
        folder: where the shards go.
        shard_bytes: most bytes of text in a shard; a document larger than that has its own.
    """
    shards: list[Shard] = []
    writer: _ShardWriter | None = None
    for document in documents:
        if writer and writer.text_bytes + document.text_bytes > shard_bytes:
            shards.append(writer.close())
            writer = None
        writer = writer or _ShardWriter(folder, len(shards))
        writer.write(document)
    if writer:
        shards.append(writer.close())
    return tuple(shards)


class _ShardWriter:
    """One shard while it is written: counts and hashes as it goes."""

    def __init__(self, folder: Path, number: int) -> None:
        self._name = f"corpus-{number:05d}.jsonl.zst"
        self._file = (folder / self._name).open("wb", buffering=_BUFFER)
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._digest = hashlib.sha256()
        self._documents = 0
        self._frames: list[int] = []
        self._frame_documents: list[int] = []
        self._lines: list[bytes] = []  # of the frame that has not ended yet
        self._frame_bytes = 0
        self.text_bytes = 0

    def write(self, document: EncodedDocument) -> None:
        if self._lines and self._frame_bytes + document.text_bytes > _FRAME_BYTES:
            self._end_frame()
        self._lines.append(document.line)
        self._frame_bytes += document.text_bytes
        self._documents += 1
        self.text_bytes += document.text_bytes

    def _end_frame(self) -> None:
        frame = self._compressor.compress(b"".join(self._lines))
        self._file.write(frame)
        self._digest.update(frame)
        self._frames.append(len(frame))
        self._frame_documents.append(len(self._lines))
        self._lines = []
        self._frame_bytes = 0

    def close(self) -> Shard:
        self._end_frame()
        self._file.close()
        return Shard(
            name=self._name,
            documents=self._documents,
            text_bytes=self.text_bytes,
            bytes=sum(self._frames),
            sha256=self._digest.hexdigest(),
            frames=tuple(self._frames),
            frame_documents=tuple(self._frame_documents),
        )


def iter_raw_documents(raw_dir: Path) -> Iterator[RawDocument]:
    """All documents of a raw corpus in order; see ``iter_shard_documents``."""
    for shard in read_manifest(raw_dir).shards:
        yield from iter_shard_documents(raw_dir, shard)


def iter_shard_documents(raw_dir: Path, shard: Shard) -> Iterator[RawDocument]:
    """The documents of one shard in order, verified while they are read.

    The checksum is known only after the last document: whoever uses the documents must not
    publish anything before this iterator has ended.

    Args:
        raw_dir: the folder of the corpus.
        shard: one of its manifest's shards.

    Raises:
        UserError: if the file is not the one that the manifest describes.
    """
    path = check_size(raw_dir, shard)
    digest = hashlib.sha256()
    with path.open("rb", buffering=_BUFFER) as file:
        try:
            for line in lines_of(unzstd(_hashed(pieces_of(file, _READ), digest))):
                yield from_json_line(line)
        except (TruncatedError, zstandard.ZstdError, ValueError, TypeError) as error:
            raise _damaged(path, error) from error
    check_sha256(path, shard, digest.hexdigest())


def frame_size(frame: bytes, path: Path) -> int:
    """Bytes that a frame takes once it is decompressed, as its header says.

    Raises:
        UserError: if it is no frame.
    """
    try:
        return zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise _damaged(path, error) from error


def frame_texts(frame: bytes, path: Path) -> list[str]:
    """The texts of one frame's documents, in order.

    Args:
        frame: its bytes, compressed.
        path: the shard's file, for the error.

    Raises:
        UserError: if it is no frame of documents.
    """
    try:
        lines = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        # Caching of values, the default, takes longer than all the rest where texts are short.
        return [from_json(line, cache_strings="keys")["text"] for line in lines_of([lines])]
    except (zstandard.ZstdError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: damaged, it does not match its manifest ({type(error).__name__}: {error}); "
        f"{remedy(path.parent)}"
    )


def _hashed(pieces: Iterable[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    """Passes pieces on and hashes them, so that verifying takes no second reading."""
    for piece in pieces:
        digest.update(piece)
        yield piece
