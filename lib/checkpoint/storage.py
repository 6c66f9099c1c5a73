"""Saving and loading checkpoints so that a kill, a full disk or a flipped bit costs no run.

Every function is called by all ranks. One save::

    all ranks   write their tensors into iter_N.partial   (torch.distributed.checkpoint, synced)
    rank 0      writes the scalars as JSON
    all ranks   hash the files, each its share
    rank 0      writes the manifest, renames iter_N.partial to iter_N, replaces the pointer file,
                removes the checkpoints that are no longer wanted

A load is two steps: `find_latest` picks and verifies a checkpoint and gives its scalars (among
them the layout it was saved under), `load_tensors` fills tensors in place, whatever the layout.
"""

import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import TensorStorageMetadata

from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged, read_scalars
from lib.checkpoint.metadata import (
    METADATA,
    SafeReader,
    TensorsOnlyPlanner,
    disagreements,
    read_metadata,
    require_agreement,
)
from lib.checkpoint.ranks import (
    gather,
    is_distributed,
    on_rank_zero,
    rank_and_size,
    shared_hashes,
)
from lib.console import warn
from lib.errors import UserError

# A tensor is wrapped in about 1.6 kB of framing for each rank that holds a piece of it.
_FRAMING_BYTES = 2048


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint.

    Attributes:
        iteration: optimizer steps done when it was saved.
        scalars: what was saved beside the tensors.
        path: its folder.
    """

    iteration: int
    scalars: dict[str, object]
    path: Path


def save(
    directory: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    scalars: dict[str, object],
    keep_last: int,
    keep_every: int | None = None,
) -> Path:
    """Saves one checkpoint and removes those that are no longer wanted.

    Args:
        directory: the state directory.
        iteration: optimizer steps done so far.
        tensors: plain tensors (the same on every rank, or named for one rank alone) and DTensors.
        scalars: everything else, as JSON; the same on every rank.
        keep_last: how many of the newest complete checkpoints stay, this one included.
        keep_every: of older ones stay those whose iteration is a multiple of this; None: none.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: it could not be written. Nothing of it is left, older checkpoints and the
            pointer to them stand.
    """
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    folder = folders.iteration_path(directory, iteration)
    unsealed = folders.partial_path(folder)
    needed = bytes_needed(tensors)
    try:
        on_rank_zero(lambda: _prepare(unsealed, needed))
        with _quiet():
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(unsealed, sync_files=True),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                no_dist=not is_distributed(),
            )
        on_rank_zero(lambda: folders.write_scalars(unsealed, iteration, scalars))
        names = on_rank_zero(lambda: [path.name for path in unsealed.iterdir()])
        hashes = shared_hashes(unsealed, names)
        on_rank_zero(lambda: _seal(unsealed, iteration, hashes))
        on_rank_zero(lambda: _publish(unsealed, folder, iteration))
    except (OSError, dcp.CheckpointException) as error:
        reason = _reason(error)
        raise UserError(on_rank_zero(lambda: _undo(folder, needed, reason))) from error
    on_rank_zero(lambda: _rotate(directory, iteration, keep_last, keep_every))
    return folder


def bytes_needed(tensors: Mapping[str, Tensor]) -> int:
    """Disk space for one checkpoint of these tensors (all ranks' pieces), rounded up.

    All ranks call it: a pipeline stage knows its own layers only.
    """
    sizes: dict[str, int] = {}
    for theirs in gather({k: each.numel() * each.element_size() for k, each in tensors.items()}):
        sizes |= theirs
    framing = _FRAMING_BYTES * (len(sizes) * rank_and_size()[1] + 8)
    return framing + sum(sizes.values())


def require_space(directory: Path, needed: int) -> None:
    """Refuses when the file system of ``directory`` has fewer than ``needed`` bytes free."""
    usage = shutil.disk_usage(directory)
    # Some network file systems report 0 of 0: that says nothing.
    if usage.total > 0 and usage.free < needed:
        raise UserError(
            f"cannot save a checkpoint in {directory}: {needed:,} bytes needed, {usage.free:,} "
            "free; free some space or lower checkpoint.keep_last, and run again"
        )


def find_latest(directory: Path, max_iteration: int | None = None) -> LoadedCheckpoint | None:
    """Picks the checkpoint to resume from; rank 0 decides, all ranks help to verify it.

    The one that the pointer file names, or the newest where the pointer cannot be followed or
    lies beyond ``max_iteration``. A damaged one is named in a warning and an older one taken.

    Args:
        directory: the state directory; it need not exist.
        max_iteration: no checkpoint after this iteration.

    Returns:
        None only where there is nothing to resume: no checkpoint, or none early enough.

    Raises:
        UserError: there are checkpoints, or a pointer to one, but none is whole.
    """
    candidates = on_rank_zero(lambda: _candidates(directory, max_iteration))
    for iteration in candidates:
        folder = folders.iteration_path(directory, iteration)
        try:
            _verify(folder)
        except Damaged as fault:
            _warn_once(f"checkpoint {folder} is damaged and is not used: {fault}")
            continue
        return LoadedCheckpoint(iteration, on_rank_zero(partial(read_scalars, folder)), folder)
    if candidates:
        raise UserError(
            f"no checkpoint in {directory} is whole ({len(candidates)} tried, see the warnings "
            "above); restore one from a backup, or start again with launch.fresh: true"
        )
    return None


def read_model(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Reads whole parameters from a checkpoint, on this process alone.

    Args:
        folder: a complete checkpoint.
        shapes: shape of each parameter by its global name, padding rows included.

    Returns:
        The parameters by global name, on the CPU, in the dtype of the master weights.
    """
    stored = read_metadata(folder).state_dict_metadata
    tensors = {}
    for name, shape in shapes.items():
        entry = stored[f"model.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        assert tuple(entry.size) == shape
        tensors[f"model.{name}"] = torch.empty(shape, dtype=entry.properties.dtype)
    with _quiet():
        dcp.load(
            tensors,
            storage_reader=SafeReader(folder),
            planner=TensorsOnlyPlanner(),
            no_dist=True,
        )
    return {name: tensors[f"model.{name}"] for name in shapes}


def load_tensors(checkpoint: LoadedCheckpoint, tensors: Mapping[str, Tensor]) -> None:
    """Fills ``tensors`` in place; pieces are cut to the present layout.

    Raises:
        UserError: a tensor is missing, superfluous, or of another shape or type.
    """
    problems: list[str]
    everyones = {name for names in gather(list(tensors)) for name in names}
    try:
        problems = disagreements(read_metadata(checkpoint.path), tensors, everyones)
    except Damaged as fault:
        problems = [str(fault)]
    found = {problem: None for ranks in gather(problems) for problem in ranks}
    require_agreement(checkpoint.path, list(found))
    try:
        with _quiet():
            dcp.load(
                dict(tensors),
                storage_reader=SafeReader(checkpoint.path),
                planner=TensorsOnlyPlanner(),
                no_dist=not is_distributed(),
            )
    except dcp.CheckpointException as error:
        raise UserError(f"checkpoint {checkpoint.path} cannot be read: {_reason(error)}") from error


def load_latest(
    directory: Path, tensors: Mapping[str, Tensor], max_iteration: int | None = None
) -> LoadedCheckpoint | None:
    """`find_latest` and `load_tensors` in one, for callers whose tensors are always the same."""
    checkpoint = find_latest(directory, max_iteration)
    if checkpoint is not None:
        load_tensors(checkpoint, tensors)
    return checkpoint


def _prepare(unsealed: Path, needed: int) -> None:
    """Rank 0: clears debris away, looks whether there is room, makes the folder."""
    unsealed.parent.mkdir(parents=True, exist_ok=True)
    folders.remove_debris(unsealed.parent)
    require_space(unsealed.parent, needed)
    unsealed.mkdir()


def _seal(unsealed: Path, iteration: int, hashes: dict[str, str]) -> None:
    """Rank 0: the manifest, over all files that are there."""
    files = {
        name: folders.FileRecord((unsealed / name).stat().st_size, sha256)
        for name, sha256 in hashes.items()
    }
    folders.write_manifest(unsealed, iteration, files)


def _publish(unsealed: Path, folder: Path, iteration: int) -> None:
    """Rank 0: the final name, then the pointer."""
    folders.publish(unsealed, folder)
    folders.write_pointer(folder.parent, iteration)


def _undo(folder: Path, needed: int, reason: str) -> str:
    """Rank 0, after a failed save: removes all of it; gives the message for the user."""
    directory = folder.parent
    try:
        pointer = folders.read_pointer(directory)
    except Damaged:
        pointer = None
    try:
        folders.remove_debris(directory)
        # Published, but the pointer could not follow: as good as not saved.
        if folder.exists() and folders.iteration_path(directory, pointer or 0) != folder:
            folders.remove(folder)
    except OSError as error:
        reason += f"; its remains could not be removed either: {error.strerror}"
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"checkpoint {folder} could not be saved: {reason}; {needed:,} bytes needed, {free:,} "
        "free; earlier checkpoints stand: mend the cause and run again to continue from the last"
    )


def _rotate(directory: Path, iteration: int, keep_last: int, keep_every: int | None) -> None:
    """Rank 0: the checkpoint is safe by now, so a failure to tidy up is only worth a warning."""
    try:
        folders.rotate(directory, iteration, keep_last, keep_every)
    except OSError as error:
        warn(f"an old checkpoint in {directory} could not be removed: {error.strerror}")


def _candidates(directory: Path, max_iteration: int | None) -> list[int]:
    """Rank 0: the iterations to try, best first; says what is odd about the directory."""
    if debris := folders.remove_debris(directory):
        warn(f"removed from {directory} what an interrupted save left: {', '.join(debris)}")
    path = directory / folders.POINTER
    present = folders.iterations(directory)
    try:
        pointer, fault = folders.read_pointer(directory), ""
        if pointer is None:
            fault = f"{path} is missing"
        elif pointer not in present:
            fault = f"{path} names iteration {pointer}, which has no checkpoint"
    except Damaged as error:
        pointer, fault = None, str(error)
    if not present:
        if path.exists():
            raise UserError(
                f"{fault}, and there is none else; restore the checkpoint, or start again with "
                "launch.fresh: true"
            )
        return []
    newest_first = [n for n in reversed(present) if max_iteration is None or n <= max_iteration]
    if not newest_first:
        warn(
            f"every checkpoint in {directory} is later than iteration {max_iteration} (the first "
            f"is {present[0]}): training starts at iteration 0"
        )
    elif fault:
        warn(f"{fault}; looking for the newest whole checkpoint")
    elif pointer in newest_first:
        return _following(path, pointer, newest_first)
    return newest_first


def _following(path: Path, pointer: int, newest_first: list[int]) -> list[int]:
    """The pointer's iteration, then older ones, then newer ones that it passes over."""
    newer = [iteration for iteration in newest_first if iteration > pointer]
    if newer:
        warn(f"{path} names iteration {pointer}: the newer checkpoint {newer[0]} is not used")
    return [iteration for iteration in newest_first if iteration <= pointer] + newer


def _verify(folder: Path) -> None:
    """Checks every file of a checkpoint against its manifest.

    Raises:
        Damaged: on every rank, if any file is not as it was written.
    """
    files = on_rank_zero(lambda: folders.read_manifest(folder))
    try:
        hashes = shared_hashes(folder, list(files))
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from error
    for name, file in files.items():
        if hashes[name] != file.sha256:
            raise Damaged(f"{name} has another sha256 than when it was written")
    for name in (METADATA, folders.SCALARS):
        if name not in files:
            raise Damaged(f"{name} is missing")
    on_rank_zero(lambda: _check_metadata(folder))


def _check_metadata(folder: Path) -> None:
    """Rank 0: the description of the tensors can be read, and asks for nothing but tensors."""
    read_metadata(folder)


def _warn_once(text: str) -> None:
    """Warns on rank 0, which speaks for all."""
    if rank_and_size()[0] == 0:
        warn(text)


def _reason(error: BaseException) -> str:
    """Why a save or a load failed, in a few words."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"{_reason(cause)} (rank {rank})" if is_distributed() else _reason(cause)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # torch's writer reports a failed write by its own consistency check, which says nothing to a
    # user; the fault of the write itself comes with it where it arose on this rank.
    if isinstance(error.__context__, OSError):
        return _reason(error.__context__)
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return f"a write failed ({text})" if "enforce fail" in text else text


@contextmanager
def _quiet() -> Generator[None]:
    """Without torch's remark that there is no process group, which is no fault here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
