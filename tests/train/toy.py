"""A toy stage (``toy_stage.py``) as a process of its own, and what becomes of it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.processes import alive, family_of, kill_all, wait_until

ROOT = Path(__file__).resolve().parents[2]
TOY_FOLDER = Path(__file__).resolve().parent
_PATIENCE_S = 200.0  # imports of torch are slow beside other programs; a success never waits


class Toy:
    """A toy stage that was started, and its family of processes."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        environment: dict[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        path = f"{ROOT}{os.pathsep}{TOY_FOLDER}"
        mode, *rest = arguments
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "toy_stage", mode, str(folder), *rest],
            env=os.environ | {"PYTHONPATH": path} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.family: list[psutil.Process] = []

    def wait_for_training(self, ranks: int) -> list[psutil.Process]:
        """Waits until every rank trains; gives the worker processes by rank."""
        files = [self.folder / f"training.{rank}" for rank in range(ranks)]
        wait_until(
            lambda: all(file.is_file() and file.read_text() for file in files), seconds=_PATIENCE_S
        )
        self.family = family_of(self.process.pid)
        return [psutil.Process(int(file.read_text())) for file in files]

    def agent(self) -> psutil.Process:
        """The torchrun process."""
        (agent,) = psutil.Process(self.process.pid).children()
        return agent

    def finish(self) -> tuple[int, str, str]:
        """Waits for the end; gives exit status, standard output and standard error."""
        out, err = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, out, err

    def saved_by(self) -> dict[str, int]:
        """Which ranks saved, and the signal that made them."""
        return {file.suffix: int(file.read_text()) for file in self.folder.glob("saved.*")}

    def nobody_left(self) -> bool:
        """Whether everyone who was in the family when training began is gone."""
        return not any(alive(process) for process in self.family)

    def end(self) -> None:
        """Kills what a failed test leaves behind."""
        kill_all(self.family)
        self.process.kill()
        self.process.wait()
