"""Saving checkpoints so that a kill, a full disk or a flipped bit costs no run.

Every function is called by all ranks. One save::

    all ranks   write their tensors into iter_N.partial   (torch.distributed.checkpoint, synced)
    rank 0      writes the scalars as JSON
    all ranks   hash the files, each its share
    rank 0      writes the manifest, renames iter_N.partial to iter_N, replaces the pointer file
    all ranks   remove the checkpoints that are no longer wanted (lib.checkpoint.retention)

Of data that several ranks hold, one of them writes it.
"""

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp

from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged
from lib.checkpoint.ranks import (
    file_threads,
    gather,
    is_distributed,
    on_rank_zero,
    rank_and_size,
    shared_hashes,
)
from lib.checkpoint.torch_files import SavedCopies, ThreadedWriter, alone_is_no_fault, reason_of
from lib.errors import UserError

# A tensor is wrapped in about 1.6 kB of framing for each rank that holds a piece of it.
_FRAMING_BYTES = 2048


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of.

    Attributes:
        iteration: optimizer steps done so far.
        tensors: plain tensors (the same on every rank, or named for one rank alone) and DTensors.
        scalars: everything else, as JSON; rank 0's are written.
        copies: of each tensor's local part, to write in place of what it holds by then; None: the
            tensors do not change meanwhile.
    """

    iteration: int
    tensors: Mapping[str, Tensor]
    scalars: dict[str, object]
    copies: Mapping[str, Tensor] | None = None


def write_checkpoint(
    directory: Path, snapshot: Snapshot, group: dist.ProcessGroup | None = None
) -> Path:
    """Writes one checkpoint and makes it the one to resume from.

    Args:
        directory: the state directory.
        snapshot: what to write.
        group: of all ranks, over gloo, where other collectives run meanwhile; None: the default.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: it could not be written. Nothing of it is left, older checkpoints and the
            pointer to them stand.
    """
    tensors, iteration = snapshot.tensors, snapshot.iteration
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    folder = folders.iteration_path(directory, iteration)
    unsealed = folders.partial_path(folder)
    needed = bytes_needed(tensors, group)
    try:
        on_rank_zero(lambda: _prepare(unsealed, needed), group)
        with nullcontext() if is_distributed() else alone_is_no_fault():
            dcp.save(
                dict(tensors),
                storage_writer=ThreadedWriter(unsealed, file_threads()),
                planner=SavedCopies(snapshot.copies),
                process_group=group,
                no_dist=not is_distributed(),
            )
        on_rank_zero(lambda: folders.write_scalars(unsealed, iteration, snapshot.scalars), group)
        names = on_rank_zero(lambda: [path.name for path in unsealed.iterdir()], group)
        hashes = shared_hashes(unsealed, names, group)
        on_rank_zero(lambda: _seal(unsealed, iteration, hashes), group)
        on_rank_zero(lambda: _publish(unsealed, folder, iteration), group)
    except (OSError, dcp.CheckpointException) as error:
        reason = reason_of(error)
        raise UserError(on_rank_zero(lambda: _undo(folder, needed, reason), group)) from error
    return folder


def bytes_needed(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Disk space for one checkpoint of these tensors (all ranks' pieces), rounded up.

    All ranks call it: a pipeline stage knows its own layers only.
    """
    sizes: dict[str, int] = {}
    mine = {name: each.numel() * each.element_size() for name, each in tensors.items()}
    for theirs in gather(mine, group):
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
