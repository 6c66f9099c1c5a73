"""Command: removes training states that nothing needs any more.

A state (state/FINGERPRINT) holds the checkpoints, with optimizer, of one configuration. Published
models do not need it; continuing or extending a run does.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import click
import psutil

from lib.atomic import PARTIAL_SUFFIX
from lib.checkpoint.directory import iterations
from lib.checkpoint.fingerprint import fingerprint
from lib.checkpoint.lock import lock
from lib.checkpoint.resume import RECORD
from lib.cli import plain_command
from lib.config.project import state_root
from lib.config.run_config import RunConfig
from lib.console import say
from lib.errors import UserError

RUN_CONFIG = Path("outputs/run_config.json")
# A state, one put aside, either half removed. Nothing else in the folder is ours to remove.
_STATE = re.compile(
    rf"(?P<fingerprint>[0-9a-f]{{16}})(?P<superseded>\.superseded-\d+)?"
    rf"(?P<partial>{re.escape(PARTIAL_SUFFIX)})?"
)
_LAUNCH_LOG = re.compile(r"launch\.(\d+)\.stderr")


@plain_command
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="Folder of the states.  [default: $DRYDOCK_STATE, else state/]",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also remove unfinished states and that of the present configuration.",
)
def main(root: Path | None, everything: bool) -> None:
    """Removes the training states that are finished or superseded, and says what it keeps and why.

    The state of outputs/run_config.json stays, so that its run can still be made longer, and so
    do unfinished states, which hold work. With --all they go too, and their runs would start from
    the beginning. A state that a running training holds is kept in any case.
    """
    root = state_root() if root is None else root
    present = [] if everything or not RUN_CONFIG.exists() else names_of(RunConfig.load(RUN_CONFIG))
    names = sorted(path.name for path in root.glob("*") if path.is_dir())
    states = [name for name in names if _STATE.fullmatch(name)]
    kept = 0
    for name in states:
        reason = _remove(root / name, present, everything=everything)
        if reason:
            say(f"kept {root / name}: {reason}")
            kept += 1
    remove_logs_of_the_dead(root)
    if not states:
        say(f"no states in {root}")
    elif kept and not everything:
        say("python -m stages.clean_state --all removes these too, unless a training holds them")


def names_of(config: RunConfig) -> list[str]:
    """The names of a run's state and of those without its later phases, where it may begin."""
    phases = len(config.data.phases)
    runs = [config, *(config.before_phase(index) for index in range(1, phases))]
    return [fingerprint(run) for run in runs]


def _remove(state: Path, present: Sequence[str], *, everything: bool) -> str | None:
    """Removes a state, or gives the reason why it stays."""
    found = _STATE.fullmatch(state.name)
    assert found is not None
    # Whoever puts a state aside holds the lock of the one that takes its place.
    successor = state.with_name(found["fingerprint"])
    try:
        with lock(successor if successor.is_dir() else state, wait_s=0):
            reason = None
            if not everything and not found["superseded"] and not found["partial"]:
                reason = reason_to_keep(state, present)
            if reason is None:
                _take_apart(state)
            return reason
    except UserError as in_use:
        return str(in_use)


def reason_to_keep(state: Path, present: Sequence[str]) -> str | None:
    """Why a state that was not superseded should stay; None if it may go.

    Args:
        state: its folder, locked.
        present: names of the states that the present run configuration can go on from, if there
            is one.
    """
    if state.name in present:
        return f"it is that of {RUN_CONFIG}{'' if state.name == present[0] else ' before a phase'}"
    try:
        is_finished = json.loads((state / RECORD).read_bytes())["finished"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {RECORD} does not say whether it is finished"
    if is_finished is True:
        return None
    saved = iterations(state)
    return f"it is unfinished, {f'at iteration {saved[-1]}' if saved else 'without a checkpoint'}"


def _take_apart(state: Path) -> None:
    """Removes a state under another name: no kill leaves half of one to be continued.

    Raises:
        UserError: the disk or the permissions do not let it.
    """
    partial = state.with_name(state.name.removesuffix(PARTIAL_SUFFIX) + PARTIAL_SUFFIX)
    try:
        size = sum(file.stat().st_size for file in state.rglob("*") if file.is_file())
        if state != partial:
            shutil.rmtree(partial, ignore_errors=True)
            state.rename(partial)
        shutil.rmtree(partial)
    except OSError as error:
        raise UserError(f"it cannot be removed: {error}") from None
    say(f"removed {state} ({size / 1e6:,.1f} MB)")


def remove_logs_of_the_dead(root: Path) -> None:
    """Removes the standard error that launchers left behind, unless they live."""
    for log in sorted(root.glob("launch.*.stderr")):
        named = _LAUNCH_LOG.fullmatch(log.name)
        if named and not psutil.pid_exists(int(named[1])):
            log.unlink(missing_ok=True)
            say(f"removed {log}")


if __name__ == "__main__":
    main()
