"""Agreement among the processes of one run: what rank 0 decides, what all of them know.

Every function is called by all ranks. Without a process group there is one rank, and nothing is
sent. A fault on one rank is raised on all of them: none is left waiting for another.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from lib.atomic import sha256_of
from lib.checkpoint.directory import Damaged
from lib.errors import UserError

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def on_rank_zero(work: Callable[[], T]) -> T:
    """Does ``work`` on rank 0 and gives its result, or raises its fault, on every rank."""
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if rank_and_size()[0] == 0:
        try:
            outcome = [(work(), None)]
        except (OSError, UserError, Damaged) as error:
            outcome = [(None, error)]
    if is_distributed():
        dist.broadcast_object_list(outcome, src=0)
    result, fault = outcome[0]
    if fault is not None:
        raise fault
    return result  # pyrefly: ignore[bad-return]  # None only where work itself returned None


def gather(value: T) -> list[T]:
    """The ``value`` of every rank, in the order of the ranks."""
    if not is_distributed():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # pyrefly: ignore[bad-return]  # every rank has filled in its own


def shared_hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The sha256 of every named file, the reading shared out among the ranks.

    One rank alone reads about 1 GB/s, which for a large model would be minutes at every start.
    """
    rank, size = rank_and_size()
    hashes: dict[str, str] = {}
    fault: OSError | None = None
    try:
        for name in sorted(names)[rank::size]:
            hashes[name] = sha256_of(folder / name)
    except OSError as error:
        fault = error
    everything: dict[str, str] = {}
    for theirs, their_fault in gather((hashes, fault)):
        if their_fault is not None:
            raise their_fault
        everything |= theirs
    return everything
