"""Looks into states and checkpoints without a model, a GPU or other processes; changes nothing.

Nothing in a checkpoint is believed before it was hashed, and nothing in it is ever run: see
`metadata`. What cannot be read is named as damage, and the rest is shown.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged
from lib.checkpoint.metadata import METADATA, SafeReader, TensorsOnlyPlanner, read_metadata
from lib.checkpoint.ranks import shared_hashes
from lib.checkpoint.resume import RECORD, StateRecord, read_record
from lib.checkpoint.torch_files import alone_is_no_fault, reason_of
from lib.errors import UserError

Kind = Literal["checkpoint", "state", "states"]
_ITERATION = re.compile(r"iter_(\d{7,})")
_KINDS = {"model": "model", "optimizer": "optimizer", "random": "random streams"}


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a checkpoint.

    Attributes:
        name: as it is saved.
        kind: ``model``, ``optimizer``, ``random streams`` or ``other``.
        dtype: number type, as ``float32``.
        shape: of the whole tensor, however it was cut.
        bytes: of its entries.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class CheckpointFacts:
    """What one checkpoint holds.

    Attributes:
        path: its folder.
        iteration: optimizer steps done when it was saved.
        scalars: what was saved beside the tensors; empty where that cannot be read.
        tensors: by name; empty where their description cannot be read.
        files: bytes of each file that is there.
        is_hashed: whether every file was hashed; only then does no damage mean that it is whole.
        damage: what is wrong with it, each with the file's name.
    """

    path: Path
    iteration: int
    scalars: dict[str, object]
    tensors: tuple[TensorFacts, ...]
    files: dict[str, int]
    is_hashed: bool
    damage: tuple[str, ...]

    def scalar(self, *names: str) -> object:
        """A scalar by the names on the way to it; None where it was not recorded."""
        value: object = self.scalars
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class StateFacts:
    """What one state directory holds.

    Attributes:
        path: the directory.
        record: its state.json; None where there is none that can be read.
        pointer: the iteration to resume from; None where no file says so.
        iterations: those that have a checkpoint.
        bytes: of all its files.
        damage: what is wrong with the files beside the checkpoints.
    """

    path: Path
    record: StateRecord | None
    pointer: int | None
    iterations: tuple[int, ...]
    bytes: int
    damage: tuple[str, ...]


def kind_of(path: Path) -> Kind:
    """What a path stands for: one checkpoint, the state of one configuration, or all states.

    Raises:
        UserError: none of them.
    """
    wanted = "a checkpoint (state/FINGERPRINT/iter_N), a state (state/FINGERPRINT) or all (state)"
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise UserError(f"{path}: {what}; give {wanted}")
    if _ITERATION.fullmatch(path.resolve().name):
        return "checkpoint"
    if path.name.endswith(folders.PARTIAL_SUFFIX):
        raise UserError(
            f"{path}: what an interrupted save or removal left, never used; give {wanted}"
        )
    if (path / folders.MANIFEST).exists() or (path / METADATA).exists():
        raise UserError(
            f"{path}: the folder of a checkpoint is called by its iteration, such as iter_0000100; "
            "rename it"
        )
    if _is_state(path):
        return "state"
    if states_in(path):
        return "states"
    raise UserError(f"{path}: holds no checkpoint; give {wanted}")


def states_in(root: Path) -> list[Path]:
    """The state directories in the folder of all states, those put aside included."""
    return sorted(path for path in root.iterdir() if path.is_dir() and _is_state(path))


def checkpoint_in(path: Path) -> Path:
    """The folder of one checkpoint: that of a state is the one to resume from.

    Raises:
        UserError: there is none.
    """
    kind = kind_of(path)
    if kind == "checkpoint":
        return path
    if kind == "states":
        raise UserError(f"{path}: holds {len(states_in(path))} states; name one of them")
    state = read_state(path)
    if not state.iterations:
        raise UserError(f"{path}: no checkpoint was saved yet")
    pointed = [iteration for iteration in state.iterations if iteration == state.pointer]
    return folders.iteration_path(path, (pointed or state.iterations)[-1])


def read_state(path: Path) -> StateFacts:
    """What a state directory holds; its checkpoints are not opened."""
    damage: list[str] = []
    record: StateRecord | None = None
    pointer: int | None = None
    try:
        record = read_record(path)
        if record is None:
            damage.append(f"{path / RECORD} is missing")
    except UserError as error:
        damage.append(str(error))
    iterations = folders.iterations(path)
    try:
        pointer = folders.read_pointer(path)
        if pointer is None and iterations:
            damage.append(f"{path / folders.POINTER} is missing")
        elif pointer is not None and pointer not in iterations:
            damage.append(f"{path / folders.POINTER} names iteration {pointer}, which is not there")
    except (Damaged, OSError) as fault:
        damage.append(str(fault))
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return StateFacts(path, record, pointer, tuple(iterations), size, tuple(damage))


def read_checkpoint(folder: Path, *, hashed: bool) -> CheckpointFacts:
    """What a checkpoint holds, and what is wrong with it.

    Args:
        folder: ``iter_N``.
        hashed: whether to read every file and compare its sha256 with the manifest's.
    """
    match = _ITERATION.fullmatch(folder.resolve().name)
    assert match is not None, "see kind_of"
    files = {path.name: path.lstat().st_size for path in sorted(folder.iterdir())}
    damage = _faults(folder, hashed=hashed)
    scalars: dict[str, object] = {}
    tensors: tuple[TensorFacts, ...] = ()
    try:
        scalars = folders.read_scalars(folder)
    except (UserError, AssertionError):
        damage.append(f"{folders.SCALARS} cannot be read")
    try:
        tensors = tensor_facts(read_metadata(folder))
    except Damaged as fault:
        damage.append(str(fault))
    known = tuple(dict.fromkeys(damage))
    return CheckpointFacts(folder, int(match[1]), scalars, tensors, files, hashed, known)


def tensor_facts(metadata: Metadata) -> tuple[TensorFacts, ...]:
    """The tensors that a checkpoint's description names."""
    facts: list[TensorFacts] = []
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(entry, TensorStorageMetadata)
        dtype = entry.properties.dtype
        kind = _KINDS.get(name.partition(".")[0], "other")
        text = str(dtype).removeprefix("torch.")
        facts.append(
            TensorFacts(name, kind, text, tuple(entry.size), entry.size.numel() * dtype.itemsize)
        )
    return tuple(facts)


class TensorReader:
    """Reads the tensors of a checkpoint one by one, whole, on the CPU."""

    def __init__(self, folder: Path) -> None:
        """Reads the description of the tensors.

        Raises:
            UserError: it cannot be read or asks for more than tensors.
        """
        self._folder = folder
        try:
            self._metadata = read_metadata(folder)
        except Damaged as fault:
            raise UserError(f"{folder}: {fault}") from None

    def read(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            UserError: its bytes are damaged, or no tensor's.
        """
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with alone_is_no_fault():
                dcp.load(
                    {name: tensor},
                    storage_reader=SafeReader(self._folder, self._metadata),
                    planner=TensorsOnlyPlanner(),
                    no_dist=True,
                )
        except dcp.CheckpointException as error:
            raise UserError(f"{self._folder}: {name} cannot be read: {reason_of(error)}") from error
        return tensor


def _is_state(path: Path) -> bool:
    return (path / RECORD).exists() or bool(folders.iterations(path))


def _faults(folder: Path, *, hashed: bool) -> list[str]:
    """What is wrong with the files of a checkpoint: all of them, as far as the manifest tells."""
    try:
        files = folders.read_manifest(folder)
        hashes = shared_hashes(folder, list(files)) if hashed else {}
    except Damaged as fault:
        return [str(fault)]
    except OSError as error:
        return [f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"]
    missing = [name for name in (METADATA, folders.SCALARS) if name not in files]
    changed = [name for name, digest in hashes.items() if digest != files[name].sha256]
    return [f"{name} is not in {folders.MANIFEST}" for name in missing] + [
        f"{name} has another sha256 than when it was written" for name in sorted(changed)
    ]
