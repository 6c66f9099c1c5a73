"""Our dealings with `torch.distributed.checkpoint`: how it writes, and what its faults mean."""

import warnings
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lib.checkpoint.ranks import is_distributed

# A file for each so many bytes of a rank: fewer would not be worth a thread.
_BYTES_PER_FILE = 64 << 20


class ThreadedWriter(dcp.FileSystemWriter):
    """A `FileSystemWriter` that writes several files at once, each synced.

    torch's own ``thread_count`` is not used: a fault in one of its threads is not heard of, and
    the checkpoint lacks what that thread was to write.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        # No copying ahead: the loader that does it opens a CUDA stream in each thread.
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self._threads = threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part; raises the first fault of any thread."""
        parts, write = _parts(plan, self._threads), super().write_data
        with ThreadPoolExecutor(len(parts)) as pool:
            written = [pool.submit(write, part, planner) for part in parts]
            results = [result for each in written for result in each.result().wait()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class SavedCopies(dcp.DefaultSavePlanner):
    """Plans by the live tensors, which know how they are cut, and writes copies of their data."""

    def __init__(self, copies: Mapping[str, Tensor] | None) -> None:
        """Takes the copy of each tensor's local part by its name; None writes what is live."""
        super().__init__(flatten_state_dict=False)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> object:
        """What is written for an entry of the plan."""
        return super().lookup_object(index) if self._copies is None else self._copies[index.fqn]


def reason_of(error: BaseException) -> str:
    """Why a save or a load failed, in a few words."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"{reason_of(cause)} (rank {rank})" if is_distributed() else reason_of(cause)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # torch's writer reports a failed write by its own consistency check, which says nothing to a
    # user; the fault of the write itself comes with it where it arose on this rank.
    if isinstance(error.__context__, OSError):
        return reason_of(error.__context__)
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return f"a write failed ({text})" if "enforce fail" in text else text


@contextmanager
def alone_is_no_fault() -> Generator[None]:
    """Without torch's remark that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def _parts(plan: SavePlan, most: int) -> list[SavePlan]:
    """The plan cut into files of about the same size, ``__RANK_0``, ``__RANK_10``, ``__RANK_20``...

    torch numbers the files of one call from 0; what stands before that number is ours.
    """
    sizes = [_size(item) for item in plan.items]
    count = max(1, min(most, sum(sizes) // _BYTES_PER_FILE))
    buckets: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for size, item in sorted(zip(sizes, plan.items, strict=True), key=lambda pair: -pair[0]):
        emptiest = filled.index(min(filled))
        buckets[emptiest].append(item)
        filled[emptiest] += size
    prefix = plan.storage_data.prefix
    return [
        replace(
            plan,
            items=bucket,
            storage_data=replace(plan.storage_data, prefix=f"{prefix}{number or ''}"),
        )
        for number, bucket in enumerate(buckets)
    ]


def _size(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
