"""The shards of the raw corpus, written and read: JSON lines, compressed with zstd."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from lib.data.compressed import TruncatedError, lines_of, pieces_of, unzstd
from lib.data.documents import RawDocument, from_json_line
from lib.data.manifest import Shard, check_sha256, check_size, read_manifest
from lib.data.shuffle import EncodedDocument
from lib.errors import UserError

# zstd's default: faster than JSON is encoded here, and within a tenth of the size of level 9.
_LEVEL = 3
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
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self._digest = hashlib.sha256()
        self._documents = 0
        self._bytes = 0
        self.text_bytes = 0

    def write(self, document: EncodedDocument) -> None:
        self._documents += 1
        self.text_bytes += document.text_bytes
        self._put(self._compressor.compress(document.line))

    def _put(self, compressed: bytes) -> None:
        self._file.write(compressed)
        self._digest.update(compressed)
        self._bytes += len(compressed)

    def close(self) -> Shard:
        self._put(self._compressor.flush())
        self._file.close()
        return Shard(
            name=self._name,
            documents=self._documents,
            text_bytes=self.text_bytes,
            bytes=self._bytes,
            sha256=self._digest.hexdigest(),
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
            raise UserError(
                f"{path}: damaged, it does not match its manifest ({type(error).__name__}: "
                f"{error}); make it again: python -m stages.download_corpus"
            ) from error
    check_sha256(path, shard, digest.hexdigest())


def _hashed(pieces: Iterable[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    """Passes pieces on and hashes them, so that verifying takes no second reading."""
    for piece in pieces:
        digest.update(piece)
        yield piece
