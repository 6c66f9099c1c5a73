"""Small raw corpora written at once, texts in the order given, for the tests of the data part."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from lib.data.documents import RawDocument, to_json_line
from lib.data.manifest import RawManifest, write_manifest
from lib.data.shards import write_shards
from lib.data.shuffle import EncodedDocument


def write_raw(folder: Path, texts: Sequence[str], shard_bytes: int = 10**6) -> RawManifest:
    """A raw corpus of these texts; each is line ``i + 1`` of the source ``s``."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [
        EncodedDocument(to_json_line(RawDocument(text, "s", number)), len(text.encode()))
        for number, text in enumerate(texts, start=1)
    ]
    manifest = RawManifest(
        source="files",
        documents=len(texts),
        text_bytes=sum(document.text_bytes for document in documents),
        rejected={},
        options={},
        versions={},
        shards=write_shards(documents, folder, shard_bytes),
    )
    write_manifest(folder, manifest)
    return manifest


def file_hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a folder, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
