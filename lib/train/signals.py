"""Stop signals as a flag that is polled, so that work ends at a place of its own choosing.

Training may only stop between two steps, with all ranks agreed, and a save takes seconds to
minutes. So the first signal sets a flag, and the loop looks at it once per step. Torch-free: it
is installed before torch is imported, which takes seconds in which a signal must not be lost.

All stop signals ask for the same: save and leave. They differ in what a second one means.

    SIGTERM, SIGINT, SIGHUP   an order; a second one more than two seconds after the first is an
                              impatient human's, and has the signal's usual effect
    SIGUSR1, SIGUSR2          a warning (Slurm's, the launcher's, the kernel's when a parent has
                              died); however often it comes, the save goes on

One order reaches a process by several ways at once (DVC, a service manager that signals a whole
group), and a save must not be cut off by the echo: hence the two seconds. What our own processes
pass on is a warning, since it may come late on a busy machine.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

WARNING = signal.SIGUSR1  # what launcher, torchrun and kernel pass on
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *_WARNINGS)
ECHO_SECONDS = 2.0


def end_as_usual(number: int) -> None:
    """Gives this process the default effect of a signal: it ends now."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class StopFlag:
    """Remembers that a stop was asked for.

    Attributes:
        signal: the number of the first stop signal, or None before it.
    """

    def __init__(self, on_second: Callable[[int], None] = end_as_usual) -> None:
        """Installs the handlers, which only the main thread may do.

        A signal that came before, and that the process which started this one held back, is
        heard now.

        Args:
            on_second: called with the signal that repeats the order after the echo time. A second
                SIGINT always counts, since only a key press sends one twice.
        """
        self.signal: int | None = None
        self._ordered_at: float | None = None
        self._interrupts = 0
        self._on_second = on_second
        for number in STOP_SIGNALS:
            under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal = number
        if number in _WARNINGS:
            return
        self._interrupts += number == signal.SIGINT
        if self._ordered_at is None:
            self._ordered_at = now
        elif self._interrupts > 1 or now - self._ordered_at > ECHO_SECONDS:
            self._on_second(number)
