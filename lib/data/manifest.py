"""The manifest of the raw corpus: what it holds, from where, and each shard's checksum.

It is written last, into a folder that is published whole, so a folder with a manifest is complete.
It holds no time and no path of this machine: the same input gives the same bytes.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from lib.atomic import write_text_atomically
from lib.errors import UserError

MANIFEST_NAME = "manifest.json"


class Shard(BaseModel):
    """One file of the corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Its file name."""
    documents: int
    """Documents in it."""
    text_bytes: int
    """Bytes of their texts in UTF-8."""
    bytes: int
    """Bytes of the file."""
    sha256: str
    """Checksum of the file."""
    frames: tuple[int, ...]
    """Bytes of each zstd frame in the file, in order; together they are ``bytes``. A frame holds
    whole documents, so any of them can be read by itself."""
    frame_documents: tuple[int, ...]
    """Documents in each frame, so that any document is found by reading one frame."""


class RawManifest(BaseModel):
    """What data/raw/NAME holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    """Version of this manifest's own form."""
    source: str
    """Key ``source`` of its section."""
    documents: int
    """Documents in all shards."""
    text_bytes: int
    """Bytes of their texts in UTF-8."""
    rejected: dict[str, int]
    """What was kept out, by kind."""
    options: dict[str, JsonValue]
    """The section of the corpus."""
    versions: dict[str, str]
    """Versions of what decides the bytes: Python, whose library may be the corpus, and zstandard,
    which compresses it."""
    shards: tuple[Shard, ...]
    """The shards in order."""

    def corpus_sha256(self) -> str:
        """One checksum of the whole corpus: over its shards' checksums, one a line."""
        lines = "".join(f"{shard.sha256}\n" for shard in self.shards)
        return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(raw_dir: Path, manifest: RawManifest) -> None:
    """Writes the manifest, sorted and indented, so that it can be read and compared."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, sort_keys=True)
    write_text_atomically(raw_dir / MANIFEST_NAME, text + "\n")


def read_manifest(raw_dir: Path) -> RawManifest:
    """Reads the manifest of a raw corpus.

    Raises:
        UserError: if there is none, or it is not a manifest of this form.
    """
    path = raw_dir / MANIFEST_NAME
    try:
        return RawManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path}: is missing, so {raw_dir} holds no corpus; {remedy(raw_dir)}"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: {field}: {first['msg']}; {remedy(raw_dir)}") from None


def remedy(raw_dir: Path) -> str:
    """What to do about a raw corpus that is not as its manifest says."""
    return f"make it again: python -m stages.download_corpus --corpus {raw_dir.name}"


def check_size(raw_dir: Path, shard: Shard) -> Path:
    """The path of a shard, which must exist in the size that the manifest says."""
    path = raw_dir / shard.name
    size = path.stat().st_size if path.is_file() else None
    if size != shard.bytes:
        has = "is missing" if size is None else f"has {size:,} bytes"
        raise UserError(f"{path}: {has}, its manifest says {shard.bytes:,}; {remedy(raw_dir)}")
    return path


def check_sha256(path: Path, shard: Shard, actual: str) -> None:
    """Refuses a shard whose checksum is not the manifest's."""
    if actual != shard.sha256:
        raise UserError(
            f"{path}: its sha256 is {actual}, its manifest says {shard.sha256}: it was changed or "
            f"damaged; {remedy(path.parent)}"
        )
