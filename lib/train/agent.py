"""Runs torchrun with other manners: told to end, it has its workers save, and waits for them.

    python -m lib.train.agent torch.distributed.run ARGUMENTS...

Left alone, torchrun sends its workers SIGTERM and kills those that are left 30 seconds later, be
it in the middle of a save (a limit that can be changed since torch 2.12 only); and it dies of
SIGUSR1, which Slurm sends to every process of a job. Here a SIGTERM, which the kernel sends too
when the launcher dies, asks the workers to save and leave; torchrun stays until they have, for it
keeps the store by which they meet. All other stop signals are held back: a signal for everybody
reaches launcher and workers, who know what to do.
"""

import contextlib
import runpy
import signal
import sys
from types import FrameType

import psutil

from lib.train.signals import STOP_SIGNALS, WARNING, end_as_usual

# torchrun must handle one signal of its own; this one is nobody's wish to save.
SIGNALS_OPTION = ("--signals-to-handle", "SIGQUIT")
_HELD_BACK = tuple(number for number in STOP_SIGNALS if number != signal.SIGTERM)


def hold_back_signals() -> None:
    """Has this process, and what it starts, not hear the other stop signals.

    They wait: a worker hears those sent to it as soon as it listens. To be called between fork
    and exec, since Python's own start is long enough to die of one.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)


def _ask_workers_to_stop(number: int, _frame: FrameType | None) -> None:
    workers = psutil.Process().children()
    if not workers:
        end_as_usual(number)  # there is nothing to save yet
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(WARNING)


def main() -> None:
    """Becomes the module that the first argument names; the others are its arguments."""
    signal.signal(signal.SIGTERM, _ask_workers_to_stop)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
