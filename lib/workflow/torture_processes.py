"""One start of a training under torture: its processes by role, its log, its end.

Every process of a start inherits a mark in its environment. So whoever outlives a blow is found,
whatever became of its parents.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from lib.checkpoint.history import HISTORY
from lib.cli import die_with_parent
from lib.workflow.scratch import workflow_environment
from lib.workflow.torture_plan import Blow, Through

Member = TypeVar("Member", bound=Hashable)

MARK = "DRYDOCK_TORTURE"
COMMANDS: dict[Through, tuple[str, ...]] = {
    "dvc": ("-m", "dvc", "repro", "pretrain"),
    "pipeline": ("-m", "dvc", "repro"),
    "pretrain": ("-m", "stages.pretrain"),
}
_RESUMED = re.compile(r"(?:continuing from|starting at) iteration (\d+) of \d+|(nothing is left)")
_TAIL_BYTES = 8192
_POLL_SECONDS = 0.002
# Generous, since machines are shared: nothing is measured against it.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Scene:
    """A scratch project and what lies beside it.

    Attributes:
        project: its folder.
        state: its one state directory; it need not exist yet.
    """

    project: Path
    state: Path

    @property
    def logs(self) -> Path:
        """Folder with the output of each start."""
        return self.project.parent / "starts"

    @property
    def temporary(self) -> Path:
        """The temporary folder of all its processes."""
        return self.project.parent / "tmp"

    def half_saved(self) -> list[str]:
        """Names of checkpoints that are just being written or taken away."""
        with contextlib.suppress(OSError):
            return [
                name
                for name in os.listdir(self.state)  # noqa: PTH208 (polled: half the time of Path)
                if name.startswith("iter_") and name.endswith(".partial")
            ]
        return []

    def half_published(self) -> bool:
        """Whether the model is just being written."""
        return (self.project / "model.partial").exists()

    def history_file(self) -> int:
        """Number of the history's file in its file system, another after each replacement."""
        try:
            return (self.state / HISTORY).stat().st_ino
        except OSError:
            return 0

    def reached(self) -> int:
        """The last step in the history; 0 without one."""
        try:
            with (self.state / HISTORY).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                found = re.findall(rb'"kind": "train", "iteration": (\d+)', file.read())
        except OSError:
            return 0
        return int(found[-1]) if found else 0


class Start:
    """A running ``dvc repro pretrain``, ``python -m stages.pretrain`` or ``dvc repro``.

    Attributes:
        through: which of the three.
        reached_before: the last step in the history when it began.
        stumbled: it was hit by something that may end it, or may not.
        begun: when it was started, by the monotonic clock.
        log: the file of its output.
        process: its outermost process.
    """

    def __init__(self, scene: Scene, through: Through, wrapper: Sequence[str] = ()) -> None:
        """Starts it.

        Args:
            scene: where.
            through: ``dvc repro pretrain``, the stage alone, or ``dvc repro``.
            wrapper: a command line that this one is appended to, which runs it.
        """
        scene.logs.mkdir(exist_ok=True)
        scene.temporary.mkdir(exist_ok=True)
        self.scene = scene
        self.through = through
        self.reached_before = scene.reached()
        self._history_before = scene.history_file()
        self.stumbled = False
        self.begun = time.monotonic()
        self.log = scene.logs / f"{len(list(scene.logs.iterdir())):03d}.log"
        environment = workflow_environment(scene.project)
        environment |= {MARK: str(scene.project), "TMPDIR": str(scene.temporary)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, *COMMANDS[through]],
                cwd=scene.project,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_with_usual_signals,
            )

    def said(self) -> str:
        """All that it wrote so far."""
        return self.log.read_text(errors="replace")

    def last_words(self) -> str:
        """The last lines of its output, as one."""
        return " / ".join(line.strip() for line in self.said().splitlines()[-6:] if line.strip())

    def resumed_at(self) -> int | None:
        """The iteration that it began or begins with, once it has said so."""
        found = _RESUMED.search(self.said())
        if found is None:
            return None
        return self.reached_before if found[2] else int(found[1])

    def began(self) -> bool:
        """Whether it has cut the history at its checkpoint, as it does before the first step."""
        return self.scene.history_file() != self._history_before

    def ended(self) -> bool:
        """Whether the outermost process is gone."""
        return self.process.poll() is not None

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Its processes by role, and all of them as ``everyone``."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            outermost = psutil.Process(self.process.pid)
            family = [outermost, *outermost.children(recursive=True)]
        return sort_by_role({process: _command(process) for process in family})

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition; False if the outermost process ends before.

        Raises:
            TimeoutError: neither came about.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.ended():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {seconds:g} s: {self.last_words()}")
            time.sleep(_POLL_SECONDS)
        return True

    def wait_for_end(self, seconds: float) -> list[str]:
        """Waits until nobody is left; gives those who still are after so many seconds."""
        deadline = time.monotonic() + seconds
        while left := survivors(self.scene):
            if time.monotonic() > deadline:
                return [f"{process.pid} {_command(process)}" for process in left]
            time.sleep(0.1)
        self.process.wait()
        return []

    def end(self) -> None:
        """Kills whatever is left."""
        for process in survivors(self.scene):
            _send(process, signal.SIGKILL)
        self.process.wait()


def sort_by_role(commands: dict[Member, str]) -> dict[str, list[Member]]:
    """Processes by role: who they are shows in their command lines and in who comes after whom.

    Args:
        commands: the command line of each, parents before their children.
    """
    roles: dict[str, list[Member]] = {"everyone": list(commands)}
    for process, command in commands.items():
        if "torch.distributed.run" in command:
            role = "torchrun"
        elif "dvc repro" in command:
            role = "dvc"
        elif "stages.pretrain" in command:
            role = "rank" if "torchrun" in roles else "launcher"
        else:
            continue
        roles.setdefault(role, []).append(process)
    return roles


def survivors(scene: Scene) -> list[psutil.Process]:
    """Processes of any start in this scene that still run; a zombie does not."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = process.environ().get(MARK) == str(scene.project)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def aim(start: Start, blow: Blow, roles: dict[str, list[psutil.Process]]) -> Blow:
    """The blow as it can be dealt: at the outermost process where its target is not there (yet)."""
    if blow.target == "group" or roles.get(blow.target):
        return blow
    return replace(blow, target="launcher" if start.through == "pretrain" else "dvc")


def strike(start: Start, blow: Blow, roles: dict[str, list[psutil.Process]]) -> None:
    """Sends a blow's signals to whom it was aimed at."""
    first, _, then = blow.signal.partition("+")
    targets = roles.get(blow.target, [])
    if blow.target == "rank":
        targets = [targets[int(blow.fraction * len(targets))]]
    elif blow.target != "everyone":
        targets = targets[:1] or roles.get("everyone", [])[:1]  # the outermost comes first
    _signal(start, blow, targets, first)
    if then:
        time.sleep(blow.stopped_s)
        _signal(start, blow, targets, then)


def _signal(start: Start, blow: Blow, targets: list[psutil.Process], name: str) -> None:
    number = signal.Signals[f"SIG{name}"]
    if blow.target == "group":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(start.process.pid, number)
        return
    for process in targets:
        _send(process, number)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _with_usual_signals() -> None:
    """As from a terminal: what a shell starts in the background ignores SIGINT."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
