"""One process at a time trains one configuration: an flock on the state directory.

The kernel drops the lock when its holder ends, however it ends, so no lock is ever stale.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lib.console import say
from lib.errors import UserError

LOCK = "lock"
_SECONDS_BETWEEN_TRIES = 0.2


@contextmanager
def lock(directory: Path, wait_s: float) -> Generator[None]:
    """Holds the lock of a state directory for as long as the context lasts.

    Args:
        directory: the state directory; made if need be.
        wait_s: how long to wait for another process (one that was just told to stop may still be
            saving).

    Raises:
        UserError: another process holds it still, or the directory cannot be written.
    """
    deadline = time.monotonic() + wait_s
    path = directory / LOCK
    while True:
        descriptor = _open(path)
        try:
            _acquire(descriptor, path, deadline)
            # Whoever removed the state while this process waited has removed this very file: a
            # lock on it would exclude nobody.
            if _is_current(descriptor, path):
                _sign(descriptor)
                yield
                return
        finally:
            os.close(descriptor)  # which releases the lock


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror}") from error


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that the path names now."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _acquire(descriptor: int, path: Path, deadline: float) -> None:
    """Tries again and again until the lock is free or the time is up; says once that it waits."""
    announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            raise UserError(f"{path} cannot be locked: {error.strerror}") from error
        else:
            return
        holder = _holder(descriptor)
        if time.monotonic() >= deadline:
            raise UserError(
                f"another process is training this configuration: {holder} holds {path}; wait "
                "for it to end, or stop it"
            )
        if not announced:
            left = deadline - time.monotonic()
            say(f"{holder} holds {path}: waiting up to {left:.0f} s for it to end")
            announced = True
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _sign(descriptor: int) -> None:
    """Leaves word of who holds the lock, for the message to others; a full disk may prevent it."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except OSError as error:
        say(f"the lock could not be signed: {error.strerror}")


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode("utf-8", "replace").strip() or "a process"
