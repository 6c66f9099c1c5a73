"""What every stage's command line shares: ``--params``, one-line errors, exit codes.

Exit codes: 0 done, 1 the user's error (one message, no traceback), 130 after Ctrl-C, 143 after
SIGTERM. Anything else is a fault of ours and shows its traceback.
"""

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, ParamSpec

import click

from lib.console import fail
from lib.errors import UserError

P = ParamSpec("P")

_PR_SET_PDEATHSIG = 1
_SETTINGS = {"max_content_width": 100}


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send this process a signal when its parent dies.

    Without it, killing DVC (or make) leaves a stage, or a whole training run, working on
    unattended. Linux only; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _exit_on_sigterm(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def stage_command(function: Callable[P, None]) -> click.Command:
    """Makes a stage's function its click command.

    Adds ``--params FILE``, passed on as ``params: Path``, and turns a ``UserError`` into one
    line on standard error with exit status 1.
    """
    option = click.option(
        "--params",
        type=click.Path(path_type=Path),
        default=Path("params.yaml"),
        show_default=True,
        help="The parameter file; every hyperparameter lives there.",
    )
    return click.command(context_settings=_SETTINGS)(option(_guarded(function)))


def plain_command(function: Callable[P, None]) -> click.Command:
    """As ``stage_command``, for a command that reads no parameters."""
    return click.command(context_settings=_SETTINGS)(_guarded(function))


def _guarded(function: Callable[P, None]) -> Callable[P, None]:
    """The function with a stage's manners: dies with its parent, ends in one line."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        # Threads that wait for each other by spinning lose whole time slices when another program
        # wants the same cores: beside 4 busy processes on 2 cores, steps took 3 times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        parent = os.getppid()
        die_with_parent()
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
        if os.getppid() != parent:  # the parent died before the kernel was asked
            raise SystemExit(128 + signal.SIGTERM)
        try:
            function(*args, **kwargs)
        except UserError as error:
            fail(str(error))
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            fail("interrupted")
            raise SystemExit(130) from None

    return guarded
