"""Reading `torch.distributed.checkpoint`'s files without trusting them.

``.metadata`` is a pickle, and unpickling calls whatever the file names: a checkpoint received from
somebody else could run code. It is never unpickled, see `metadata_pickle`. Byte entries (pickles
inside the data files) are refused as well: this project stores tensors only, scalars are JSON. The
tensors themselves torch reads with ``weights_only=True``, which admits nothing but tensors.
"""

import io
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from lib.checkpoint.directory import Damaged
from lib.checkpoint.metadata_pickle import Refused, read_description
from lib.errors import UserError

METADATA = ".metadata"
# Tensors of one rank alone (random streams). Other ranks' are no business of this one, hence no
# error when a checkpoint holds more of them than were asked for.
RANK_PREFIX = "random."
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_NAME = re.compile(r"[A-Za-z0-9_.]+")


class SafeReader(FileSystemReader):
    """A `FileSystemReader` that never runs what the checkpoint names."""

    def __init__(self, path: Path, metadata: Metadata | None = None) -> None:
        """Reads from a folder; ``metadata``, where it was read before, is not read again."""
        super().__init__(path)
        self._folder = path
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Reads ``.metadata``; the arguments of newer releases (a rank) are not needed here."""
        metadata = self._metadata or read_metadata(self._folder)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorsOnlyPlanner(DefaultLoadPlanner):
    """Plans the loading of flat names to tensors; refuses to unpickle byte entries."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never: a byte entry is a pickle."""
        raise Damaged(f"{read_item.dest_index.fqn} is a byte entry")


def read_metadata(folder: Path) -> Metadata:
    """The description of a checkpoint's tensors.

    Raises:
        Damaged: it is no such description, or asks for more than tensors in files beside it.
    """
    try:
        metadata = read_description((folder / METADATA).read_bytes())
        if not isinstance(metadata, Metadata):
            raise Damaged(f"{METADATA} does not describe a checkpoint")
        _require_tensors_only(metadata)
    except Damaged:
        raise
    except Refused as refusal:
        raise Damaged(f"{METADATA} {refusal}") from None
    except OSError as error:
        raise Damaged(f"{METADATA} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise Damaged(f"{METADATA} is damaged: {' '.join(ascii(error).split())}") from error
    return metadata


def _require_tensors_only(metadata: Metadata) -> None:
    """Refuses a description that holds other things, or tensors that are not there in whole."""
    if not isinstance(metadata.storage_meta, StorageMeta | None):
        raise Damaged(f"{METADATA} does not describe a checkpoint")
    for name in metadata.state_dict_metadata:
        if not _NAME.fullmatch(name):
            raise Damaged(f"{METADATA} has a tensor with the name {name!a}")
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex):
            raise Damaged(f"{METADATA} does not say which tensor lies where")
        if not _DATA_FILE.fullmatch(place.relative_path):
            raise Damaged(f"{METADATA} points to {place.relative_path!a}")
        if min(place.offset, place.length) < 0 or place.transform_descriptors is not None:
            raise Damaged(f"{METADATA} has {index.fqn!a} in a place that cannot be read")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise Damaged(f"{METADATA} holds {name}, which is not a tensor")
        _require_whole(name, entry, metadata)


def _require_whole(name: str, entry: TensorStorageMetadata, metadata: Metadata) -> None:
    """A gap would leave in the tensor whatever was there before."""
    stored = 0
    for chunk in entry.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, entry.size, strict=True)):
            raise Damaged(f"{METADATA} has a piece of {name} that lies outside it")
        if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
            raise Damaged(f"{METADATA} does not say where {name} is")
        stored += math.prod(chunk.sizes)
    if stored != math.prod(entry.size) or not isinstance(entry.properties.dtype, torch.dtype):
        raise Damaged(f"{METADATA} does not have all of {name}")


def disagreements(
    metadata: Metadata, tensors: Mapping[str, Tensor], everyones: Collection[str]
) -> list[str]:
    """How a checkpoint differs from the tensors that it is to fill: names, shapes, types.

    Args:
        metadata: of the checkpoint.
        tensors: this rank's.
        everyones: the names that any rank fills: a pipeline stage fills its own layers only.
    """
    stored = metadata.state_dict_metadata
    found = [f"{name} is missing" for name in sorted(set(tensors) - set(stored))]
    found += [
        f"{name} has no place in this model"
        for name in sorted(set(stored) - set(everyones))
        if not name.startswith(RANK_PREFIX)
    ]
    for name in sorted(set(stored) & set(tensors)):
        entry, tensor = stored[name], tensors[name]
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != tuple(tensor.shape):
            found.append(f"{name} has shape {tuple(entry.size)} instead of {tuple(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype:
            found.append(f"{name} is {entry.properties.dtype} instead of {tensor.dtype}")
    return found


def require_agreement(folder: Path, problems: list[str]) -> None:
    """Raises one error that names the first few disagreements of a checkpoint."""
    if not problems:
        return
    shown = "; ".join(problems[:5])
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    raise UserError(f"checkpoint {folder} does not fit this model: {shown}{more}")
