"""Agreement among the processes of one run: what rank 0 decides, what all of them know.

Every function is called by all ranks. Without a process group there is one rank, and nothing is
sent. A fault on one rank is raised on all of them: none is left waiting for another. ``group`` is
of all ranks, for a thread whose messages must not mix with those of the main thread; None is the
default group.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from lib.atomic import sha256_of
from lib.checkpoint.directory import Damaged
from lib.errors import UserError

T = TypeVar("T")

_MOST_THREADS = 8


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def local_ranks() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def file_threads() -> int:
    """How many files this process writes or hashes at once: its share of the cores, 8 at most."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // local_ranks()))


def on_rank_zero(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Does ``work`` on rank 0 and gives its result, or raises its fault, on every rank."""
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if rank_and_size()[0] == 0:
        try:
            outcome = [(work(), None)]
        except (OSError, UserError, Damaged) as error:
            outcome = [(None, error)]
    if is_distributed():
        dist.broadcast_object_list(outcome, src=0, group=group)
    result, fault = outcome[0]
    if fault is not None:
        raise fault
    return result  # pyrefly: ignore[bad-return]  # None only where work itself returned None


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``value`` of every rank, in the order of the ranks."""
    if not is_distributed():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values  # pyrefly: ignore[bad-return]  # every rank has filled in its own


def shared_hashes(
    folder: Path, names: Sequence[str], group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """The sha256 of every named file, the reading shared out among the ranks and their threads.

    One thread alone hashes about 1 GB/s, which for a large model would be minutes at every start.
    """
    rank, size = rank_and_size()
    mine = sorted(names)[rank::size]
    hashes: dict[str, str] = {}
    fault: OSError | None = None
    try:
        with ThreadPoolExecutor(file_threads()) as pool:
            found = pool.map(sha256_of, [folder / name for name in mine])
            hashes = dict(zip(mine, found, strict=True))
    except OSError as error:
        fault = error
    everything: dict[str, str] = {}
    for theirs, their_fault in gather((hashes, fault), group):
        if their_fault is not None:
            raise their_fault
        everything |= theirs
    return everything
