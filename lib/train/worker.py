"""A training worker's side of its bargain with the launcher: stop when asked, report the end.

torchrun knows only a worker's exit code and prints a traceback of its own for whatever is not
zero. What really happened therefore goes by files in the folder that the launcher names in
DRYDOCK_LAUNCH_DIR, and the launcher is the one that speaks. Torch-free, so that the stop signals
are heard from a worker's first moment.

    if is_worker():
        with worker_session() as stop:
            ...  # import torch, build, train; poll stop.requested once per step; when it is set
            ...  # save on all ranks and `raise Stopped("saved iteration 120")` on all ranks
"""

import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lib.atomic import write_text_atomically
from lib.cli import die_with_parent
from lib.errors import UserError
from lib.train.signals import WARNING, StopFlag

LAUNCH_DIR_VARIABLE = "DRYDOCK_LAUNCH_DIR"
DEVICE_VARIABLE = "DRYDOCK_DEVICE"
BEGUN = "begun"
USER_ERROR = "user_error"
CRASH = "crash"
STOPPED = "stopped"


class Stopped(Exception):
    """A stop was asked for and the state is saved; the message says what was saved.

    Every rank raises it, after the last collective operation: the ranks then leave with status 0
    one after another. Any other status would make torchrun signal those still on their way out.
    """


def is_worker() -> bool:
    """Whether the launcher started this process (rather than a person or DVC)."""
    return LAUNCH_DIR_VARIABLE in os.environ


def worker_device() -> str:
    """The device type that the launcher counted its processes for: ``cpu`` or ``cuda``."""
    return os.environ[DEVICE_VARIABLE]


def _report(kind: str, text: str) -> None:
    folder = Path(os.environ[LAUNCH_DIR_VARIABLE])
    write_text_atomically(folder / f"{kind}.{os.environ['RANK']}", text)


@contextmanager
def worker_session() -> Generator[StopFlag, None, None]:
    """Wraps all of a worker's life; gives the flag that says when to save and leave."""
    parent = os.getppid()
    stop = StopFlag()
    die_with_parent(WARNING)
    if os.getppid() != parent:
        raise SystemExit(143)
    _report(BEGUN, "")
    try:
        yield stop
    except Stopped as stopped:
        _report(STOPPED, str(stopped))
    except UserError as error:
        _report(USER_ERROR, str(error))
        raise SystemExit(1) from None
    except Exception:
        _report(CRASH, traceback.format_exc())
        traceback.print_exc(file=sys.stderr)
        raise SystemExit(1) from None
