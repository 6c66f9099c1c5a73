"""A run that got later phases goes on from what the run without them has trained.

A phase that is added (``data.phases``) gives a run another fingerprint, and so another state. Yet
up to the sample at which the first added phase begins, both runs are one: same weights, same order
of samples. A new state therefore takes over the checkpoints that the other one has from before
that moment, with their history. Their files are linked where the file system can: no checkpoint is
ever changed, only removed, so each state may remove its own. Needs no torch.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lib.atomic import sync_file
from lib.checkpoint import directory as folders
from lib.checkpoint.fingerprint import fingerprint
from lib.checkpoint.history import HISTORY
from lib.config.batch_schedule import BatchSchedule
from lib.config.run_config import RunConfig
from lib.console import warn

_LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class Beginning:
    """Where a run with added phases can begin.

    Attributes:
        state: the state of the run without them.
        last: the last iteration that both runs have in common.
    """

    state: Path
    last: int

    def iterations(self) -> list[int]:
        """The checkpoints that both runs would have come to, in ascending order."""
        return [number for number in folders.iterations(self.state) if number <= self.last]


def find_beginning(root: Path, run_config: RunConfig) -> Beginning | None:
    """The state that has come farthest on this run's way; None where there is none.

    Args:
        root: folder of the states.
        run_config: the run, which has no state of its own yet.
    """
    schedule = BatchSchedule.of(run_config.training)
    best: Beginning | None = None
    for index, phase in enumerate(run_config.data.phases[1:], start=1):
        state = root / fingerprint(run_config.before_phase(index))
        found = Beginning(state, schedule.iterations(phase.from_samples))
        present, common = folders.iterations(state), found.iterations()
        if present and not common:
            warn(
                f"{state} is this run without what data.phases adds from sample "
                f"{phase.from_samples} on, but its first checkpoint, iteration {present[0]}, lies "
                f"after iteration {found.last}, where that begins: it cannot be used"
            )
        if common and (best is None or common[-1] >= best.iterations()[-1]):
            best = found
    return best


def take_over(beginning: Beginning, path: Path) -> int:
    """Gives a new state the checkpoints and the history of the run without the added phases.

    Rows of later steps are cut at the resume, as after any kill. A kill in the middle of this
    leaves a folder without a record, which is put aside at the next start.

    Returns:
        The iteration of the newest checkpoint.
    """
    iterations = beginning.iterations()
    for iteration in iterations:
        folder = folders.iteration_path(path, iteration)
        partial = folders.partial_path(folder)
        shutil.copytree(
            folders.iteration_path(beginning.state, iteration), partial, copy_function=_link
        )
        sync_file(partial)
        partial.rename(folder)
    history = beginning.state / HISTORY
    if history.exists():
        shutil.copyfile(history, path / HISTORY)
        sync_file(path / HISTORY)
    folders.write_pointer(path, iterations[-1])
    return iterations[-1]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync_file(Path(target))
