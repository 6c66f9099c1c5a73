"""Reading `torch.distributed.checkpoint`'s ``.metadata`` without trusting it.

The file is a pickle, and unpickling calls whatever the file names: a checkpoint received from
somebody else could run code. It is read here by an unpickler that admits the few classes which
describe tensors and refuses all else. Byte entries (pickles inside the data files) are refused as
well: this project stores tensors only, scalars are JSON.
"""

import io
import pickle
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

from lib.checkpoint.directory import Damaged
from lib.errors import UserError

METADATA = ".metadata"
# Tensors of one rank alone (random streams). Other ranks' are no business of this one, hence no
# error when a checkpoint holds more of them than were asked for.
RANK_PREFIX = "random."
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_ADMITTED = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves the names of tensor descriptions and of dtypes, nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        """Gives the named class, or refuses."""
        if (module_name, global_name) in _ADMITTED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise Damaged(f"{METADATA} asks for {module_name}.{global_name}, which is not allowed")


class SafeReader(FileSystemReader):
    """A `FileSystemReader` that never runs what the checkpoint names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Reads ``.metadata``; the arguments of newer releases (a rank) are not needed here."""
        metadata = read_metadata(self._folder)
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
        # S301 is about trusting pickles; this one resolves no name outside the list above.
        metadata = _MetadataUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    except Damaged:
        raise
    except OSError as error:
        raise Damaged(f"{METADATA} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise Damaged(f"{METADATA} is damaged: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Damaged(f"{METADATA} does not describe a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise Damaged(f"{METADATA} holds {name}, which is not a tensor")
    for place in metadata.storage_data.values():
        if not _DATA_FILE.fullmatch(place.relative_path):
            raise Damaged(f"{METADATA} points to {place.relative_path}")
    return metadata


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
