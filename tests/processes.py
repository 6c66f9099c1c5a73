"""Families of processes: who is in one, who still lives, and waiting for things to happen."""

import contextlib
import signal
import time
from collections.abc import Callable

import psutil


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs. A zombie does not: process 1 of a container may never reap."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, eldest first."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def by_role(family: list[psutil.Process]) -> dict[str, psutil.Process]:
    """The members of a pipeline's process tree: make, dvc, launcher, torchrun, worker."""
    roles = {}
    for process in family:
        command = " ".join(process.cmdline())
        if command.startswith("make "):
            role = "make"
        elif "lib.train.agent" in command:
            role = "torchrun"
        elif "dvc repro" in command:
            role = "dvc"
        else:
            role = "worker" if "torchrun" in roles else "launcher"
        roles.setdefault(role, process)
    return roles


def wait_until(condition: Callable[[], bool], seconds: float = 60.0, pause: float = 0.02) -> None:
    """Waits for a condition; fails when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def kill_all(family: list[psutil.Process]) -> None:
    """Ends what a failed test left."""
    for process in filter(alive, family):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
