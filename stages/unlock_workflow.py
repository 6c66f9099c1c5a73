"""Command: removes a lock of DVC's that a killed process left behind.

DVC notes who reads and writes what in .dvc/tmp/rwlock. A note of a dead process heals itself at
the next command, with two exceptions: a kill in the very moment of writing leaves the file empty
or cut off, and after a restart (of a container, say) the dead process's number may belong to
another one.
"""

from pathlib import Path

import psutil

from lib.cli import plain_command
from lib.console import say
from lib.errors import UserError

RWLOCK = Path(".dvc/tmp/rwlock")


@plain_command
def main() -> None:
    """Removes .dvc/tmp/rwlock, unless a DVC command is at work in this project."""
    if not RWLOCK.exists():
        say(f"nothing to unlock: there is no {RWLOCK}")
        return
    working = dvc_processes(Path.cwd())
    if working:
        who = "; ".join(
            f"process {process.pid}: {' '.join(command)}" for process, command in working
        )
        raise UserError(
            f"DVC is at work here, so the lock stays ({who}). Wait for it to end, or stop it with "
            "Ctrl-C in its terminal or `kill` and its process number."
        )
    RWLOCK.unlink()
    say(f"removed {RWLOCK}: no DVC command runs in this project. Run the pipeline again.")


def dvc_processes(project: Path) -> list[tuple[psutil.Process, list[str]]]:
    """DVC commands at work in a project, experiments in its temporary folders included.

    One whose working directory may not be read (another user's) counts too: better a lock too
    many than two writers.
    """
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if not _is_dvc(command) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not Path(process.cwd()).is_relative_to(project.resolve()):
                continue
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            command = ["a dvc command of another user"]
        found.append((process, command))
    return found


def _is_dvc(command: list[str]) -> bool:
    """Whether a command line is ``dvc ...``, ``python .../dvc ...`` or ``python -m dvc ...``."""
    names = [Path(word).name for word in command[:3]]
    return "dvc" in names[:2] or names[1:] == ["-m", "dvc"]


if __name__ == "__main__":
    main()
