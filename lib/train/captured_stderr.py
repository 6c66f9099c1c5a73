"""The workers' standard error: kept whole in a file, its end in memory, warnings passed on."""

import contextlib
import sys
from collections import deque
from pathlib import Path
from threading import Thread
from typing import IO

_LINES_IN_MEMORY = 2000
_SHOWN_LIVE = b"warning: "  # as lib.console.warn writes them


class CapturedStderr:
    """Reads a pipe in a thread of its own until every writer has closed it."""

    def __init__(self, pipe: IO[bytes] | None, log: Path) -> None:
        assert pipe is not None
        self.log = log
        self._pipe = pipe
        self._lines: deque[bytes] = deque(maxlen=_LINES_IN_MEMORY)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Reads on whatever happens to the file: a worker whose pipe is full would stand still."""
        log: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # the disk may be read-only
            log = self.log.open("wb", buffering=0)
        with contextlib.closing(log) if log else contextlib.nullcontext():
            for line in self._pipe:
                if log is not None:
                    with contextlib.suppress(OSError):  # or full
                        log.write(line)
                self._lines.append(line)
                if line.startswith(_SHOWN_LIVE):
                    with contextlib.suppress(OSError):  # the terminal may be gone
                        sys.stderr.write(line.decode(errors="replace"))
                        sys.stderr.flush()

    def finish(self) -> None:
        """Waits for the end of the pipe, once its writers are gone."""
        self._reader.join(timeout=10)

    def text(self) -> str:
        """The last lines, as text."""
        return b"".join(self._lines).decode(errors="replace")

    def discard(self) -> None:
        """Removes the file: the run ended as it should, and what mattered was said."""
        with contextlib.suppress(OSError):
            self.log.unlink(missing_ok=True)
