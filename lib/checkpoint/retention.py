"""Which checkpoints stay when a new one is safe, and which of them are known to be whole.

Disks spoil files that nobody looks at, so a checkpoint counts as kept only once this run knows it
to be whole: it has written it, resumed from it, or hashed it again. An older one goes only when
``keep_last`` such ones stand after it. The checkpoint that a run was resumed from is therefore
never removed before a newer one was completed and verified.
"""

from pathlib import Path

import torch.distributed as dist

from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged
from lib.checkpoint.loading import verify
from lib.checkpoint.ranks import on_rank_zero, rank_and_size
from lib.console import warn


class Retention:
    """The rule of section ``checkpoint``, and what this run knows of its checkpoints.

    One on each rank, used alike on all of them.
    """

    def __init__(self, keep_last: int, keep_every: int | None = None) -> None:
        """Takes the rule.

        Args:
            keep_last: how many of the newest whole checkpoints stay.
            keep_every: of older ones stay those whose iteration is a multiple of this; None: none.
        """
        assert keep_last >= 1
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._whole: set[int] = set()
        self._damaged: set[int] = set()

    def trust(self, iteration: int) -> None:
        """Notes that a checkpoint was just written or verified."""
        self._whole.add(iteration)
        self._damaged.discard(iteration)

    def apply(
        self, directory: Path, iteration: int, group: dist.ProcessGroup | None = None
    ) -> list[int]:
        """Removes what is no longer wanted, now that the checkpoint of ``iteration`` is written.

        A damaged one is named in a warning and does not count, so an older one stays in its place.
        Checkpoints after ``iteration`` stay: a run made shorter by mistake must not cost the
        longer one's work. A failure to remove is only worth a warning: the new one is safe.

        Returns:
            The iterations to remove, in ascending order.
        """
        self.trust(iteration)
        present = on_rank_zero(lambda: folders.iterations(directory), group)
        past = [number for number in present if number <= iteration]
        if not self._unwanted(past):
            return []
        self._look_at_newest(directory, past, group)
        unwanted = self._unwanted(past)
        on_rank_zero(lambda: _remove(directory, unwanted), group)
        return unwanted

    def _unwanted(self, past: list[int]) -> list[int]:
        counted = [number for number in past if number not in self._damaged]
        if len(counted) <= self.keep_last:
            return []
        kept = folders.kept_iterations(counted, self.keep_last, self.keep_every)
        # A damaged one stays until it would go anyway: somebody may want to look at it.
        older = [number for number in past if number < counted[-self.keep_last]]
        return [number for number in older if number not in kept]

    def _look_at_newest(
        self, directory: Path, past: list[int], group: dist.ProcessGroup | None
    ) -> None:
        """Verifies from the newest on, until ``keep_last`` are known to be whole."""
        found = 0
        for number in reversed(past):
            if found < self.keep_last and number not in self._damaged:
                found += self._is_whole(folders.iteration_path(directory, number), number, group)

    def _is_whole(self, folder: Path, iteration: int, group: dist.ProcessGroup | None) -> bool:
        if iteration in self._whole:
            return True
        try:
            verify(folder, group)
        except (Damaged, OSError) as fault:
            self._damaged.add(iteration)
            if rank_and_size()[0] == 0:
                warn(f"checkpoint {folder} is damaged and does not count as kept: {fault}")
            return False
        self._whole.add(iteration)
        return True


def _remove(directory: Path, unwanted: list[int]) -> None:
    """Rank 0."""
    try:
        for iteration in unwanted:
            folders.remove(folders.iteration_path(directory, iteration))
    except OSError as error:
        warn(f"an old checkpoint in {directory} could not be removed: {error.strerror}")
