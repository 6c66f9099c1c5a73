"""Loading checkpoints: which one to resume from, whether it is whole, and its tensors.

Every function is called by all ranks. A load is two steps: `find_latest` picks
and verifies a checkpoint and gives its scalars (among them the layout it was saved under),
`load_tensors` fills tensors in place, whatever the layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp

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
from lib.checkpoint.torch_files import alone_is_no_fault, reason_of
from lib.console import warn
from lib.errors import UserError


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
            verify(folder)
        except Damaged as fault:
            if rank_and_size()[0] == 0:
                warn(f"checkpoint {folder} is damaged and is not used: {fault}")
            continue
        return LoadedCheckpoint(iteration, on_rank_zero(partial(read_scalars, folder)), folder)
    if candidates:
        raise UserError(
            f"no checkpoint in {directory} is whole ({len(candidates)} tried, see the warnings "
            "above); restore one from a backup, or start again with launch.fresh: true"
        )
    return None


def verify(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Checks every file of a checkpoint against its manifest.

    Raises:
        Damaged: on every rank, if any file is not as it was written.
    """
    files = on_rank_zero(lambda: folders.read_manifest(folder), group)
    try:
        hashes = shared_hashes(folder, list(files), group)
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from error
    for name, file in files.items():
        if hashes[name] != file.sha256:
            raise Damaged(f"{name} has another sha256 than when it was written")
    for name in (METADATA, folders.SCALARS):
        if name not in files:
            raise Damaged(f"{name} is missing")
    on_rank_zero(lambda: _check_metadata(folder), group)


def load_tensors(checkpoint: LoadedCheckpoint, tensors: Mapping[str, Tensor]) -> None:
    """Fills ``tensors`` in place; pieces are cut to the present layout.

    Raises:
        UserError: a tensor is missing, superfluous, or of another shape or type.
    """
    metadata = None
    problems: list[str] = []
    everyones = {name for names in gather(list(tensors)) for name in names}
    try:
        metadata = read_metadata(checkpoint.path)
        problems = disagreements(metadata, tensors, everyones)
    except Damaged as fault:
        problems = [str(fault)]
    found = {problem: None for ranks in gather(problems) for problem in ranks}
    require_agreement(checkpoint.path, list(found))
    try:
        with alone_is_no_fault():
            dcp.load(
                dict(tensors),
                storage_reader=SafeReader(checkpoint.path, metadata),
                planner=TensorsOnlyPlanner(),
                no_dist=not is_distributed(),
            )
    except dcp.CheckpointException as error:
        reason = reason_of(error)
        raise UserError(f"checkpoint {checkpoint.path} cannot be read: {reason}") from error


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


def _check_metadata(folder: Path) -> None:
    """Rank 0: the description of the tensors can be read, and asks for nothing but tensors."""
    read_metadata(folder)
