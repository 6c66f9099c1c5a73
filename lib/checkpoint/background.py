"""Saving while training goes on: training stands still for a copy in memory only.

    main thread    copies this rank's tensors into host memory   (buffers are kept and used again)
    saver thread   writes, hashes and publishes the copies       (lib.checkpoint.saving)

Each rank has one thread, and the threads agree over a gloo group of their own, so that their
messages never mix with those of training. How a tensor is cut is read from the live one, which
does not change; what is written comes from the copy.
"""

import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Thread

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lib.checkpoint.ranks import (
    file_threads,
    gather,
    is_distributed,
    local_ranks,
    rank_and_size,
)
from lib.checkpoint.retention import Retention
from lib.checkpoint.saving import Snapshot, write_checkpoint
from lib.console import say, warn
from lib.errors import UserError
from lib.parallel.storage import local

# A rank waits so long for the slowest one's disk; a dead one is noticed at once.
_PATIENCE = timedelta(days=1)
_SECONDS_OF_SILENCE = 1.0


class Saver:
    """Saves the checkpoints of one run; one on each rank, used alike on all of them."""

    def __init__(self, directory: Path, retention: Retention, *, background: bool) -> None:
        """Joins the other ranks' savers.

        Args:
            directory: the state directory.
            retention: which checkpoints stay.
            background: whether `start` returns before the checkpoint is written.
        """
        self._directory = directory
        self._retention = retention
        self._background = background
        self._group: dist.ProcessGroup | None = None
        if is_distributed():
            group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._copies = HostCopies()
        self._has_asked_for_room = False
        self._thread: Thread | None = None
        self._fault: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed; `finish` raises its fault."""
        return self._fault is not None

    def start(
        self, iteration: int, tensors: Mapping[str, Tensor], scalars: dict[str, object]
    ) -> None:
        """Begins to save; the tensors may change as soon as this returns.

        Waits for an unfinished save first. Saves in the foreground where it is to, or where the
        copies would not fit into memory.

        Args:
            iteration: optimizer steps done so far.
            tensors: this rank's, as `Snapshot` wants them.
            scalars: everything else, as JSON; rank 0's are written.

        Raises:
            UserError: this save, or the one waited for, could not be done.
        """
        self.finish()
        if not self._in_background(tensors):
            self._save(Snapshot(iteration, tensors, scalars))
            return
        snapshot = Snapshot(iteration, tensors, scalars, self._copies.take(tensors))
        self._thread = Thread(target=self._save_or_keep_fault, args=(snapshot,), name="saver")
        self._thread.start()

    def save(
        self, iteration: int, tensors: Mapping[str, Tensor], scalars: dict[str, object]
    ) -> None:
        """Saves while the caller waits; arguments and errors as of `start`.

        Also by way of the copies: a GPU's tensors are written faster so.
        """
        self.start(iteration, tensors, scalars)
        self.finish()

    def finish(self) -> None:
        """Waits for the save in the background, if there is one.

        Raises:
            UserError: it failed; the same on all ranks. An earlier checkpoint stands.
        """
        self.wait()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def wait(self) -> None:
        """As `finish`, but raises nothing: for a run that ends with an error of its own."""
        if self._thread is None:
            return
        self._thread.join(_SECONDS_OF_SILENCE)
        if self._thread.is_alive() and rank_and_size()[0] == 0:
            say("waiting until the checkpoint is saved")
        self._thread.join()
        self._thread = None

    def _in_background(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether to save in the background, on all ranks; looks for memory once."""
        if self._background and not self._has_asked_for_room:
            self._has_asked_for_room = True
            needed = self._copies.bytes_needed(tensors) * local_ranks()
            free = psutil.virtual_memory().available
            needs = [need for need in gather((needed, free), self._group) if need[0] > need[1]]
            self._background = not needs
            if needs and rank_and_size()[0] == 0:
                needed, free = max(needs)
                warn(
                    f"no memory for runtime.background_save: {needed:,} bytes needed, {free:,} "
                    "free; training waits while a checkpoint is saved"
                )
        return self._background

    def _save(self, snapshot: Snapshot) -> None:
        path = write_checkpoint(self._directory, snapshot, self._group)
        if rank_and_size()[0] == 0:
            say(f"saved iteration {snapshot.iteration} to {path}")
        self._retention.apply(self._directory, snapshot.iteration, self._group)

    def _save_or_keep_fault(self, snapshot: Snapshot) -> None:
        try:
            self._save(snapshot)
        except Exception as fault:  # all of them: nobody else would hear of it
            self._fault = fault
            if rank_and_size()[0] == 0:
                warn(f"saving iteration {snapshot.iteration} failed; the run ends with this step")


class HostCopies:
    """Copies of this rank's tensors in host memory, made anew for each save in the same buffers."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def bytes_needed(self, tensors: Mapping[str, Tensor]) -> int:
        """Memory for the first copies of these tensors."""
        parts = map(local, tensors.values())
        return sum(part.numel() * part.element_size() for part in parts)

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies the local part of each tensor, which may change as soon as this returns."""
        sources = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        new = sources.keys() - self._buffers.keys()
        with ThreadPoolExecutor(file_threads()) as pool:
            # Zeros, so that the memory is really there: threads get it several times as fast.
            made = pool.map(_zeros_for, [sources[name] for name in new])
            self._buffers |= dict(zip(new, made, strict=True))
        for name in new:
            if sources[name].is_cuda:
                _pin(self._buffers[name])
        for name, source in sources.items():
            self._buffers[name].copy_(source, non_blocking=True)
        if any(source.is_cuda for source in sources.values()):
            torch.cuda.current_stream().synchronize()  # all copies were queued there
        return {name: self._buffers[name] for name in sources}


def _zeros_for(source: Tensor) -> Tensor:
    return torch.zeros(source.shape, dtype=source.dtype)


def _pin(buffer: Tensor) -> None:
    """Lets a GPU write into host memory by itself, which is several times as fast.

    ``pin_memory=True`` would take up to twice the memory (it rounds up to a power of two) and
    three times as long: 8 s instead of 2.2 s for 14 GB beside an H200.
    """
    size = buffer.numel() * buffer.element_size()
    if size == 0:
        return
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()
    assert runtime is not None
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
    except torch.cuda.CudaError as error:
        raise UserError(
            f"{size:,} bytes of memory for the copy of the state cannot be pinned ({error}); set "
            "runtime.background_save: false"
        ) from error
    unpin = weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the process takes it along
