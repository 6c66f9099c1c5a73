"""Stop signals as a flag that is polled, so that work ends at a place of its own choosing.

Training may only stop between two steps, with all ranks agreed, and a save takes seconds to
minutes. So the first signal sets a flag, and the loop looks at it once per step. Torch-free: it
is installed before torch is imported, which takes seconds in which a signal must not be lost.

One wish to stop reaches a process by several ways at once (the launcher, torchrun, the kernel
when a parent dies, a service manager that signals a whole group), and a save must not be cut off
by the echo. Signals within two seconds of the first are therefore the same wish; a later one is
an impatient human's, who gets the signal's usual effect.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

WORKER_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
LAUNCHER_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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

    def __init__(
        self, signals: Sequence[int], on_second: Callable[[int], None] = end_as_usual
    ) -> None:
        """Installs the handlers, which only the main thread may do.

        Args:
            signals: the signals that ask for a stop.
            on_second: called with the signal that repeats the wish after the echo time. A second
                SIGINT always counts, since only a key press sends one twice.
        """
        self.signal: int | None = None
        self._first_at = 0.0
        self._interrupts = 0
        self._on_second = on_second
        for number in signals:
            signal.signal(number, self._receive)

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        self._interrupts += number == signal.SIGINT
        if self.signal is None:
            self.signal = number
            self._first_at = now
        elif self._interrupts > 1 or now - self._first_at > ECHO_SECONDS:
            self._on_second(number)
