"""What a person sees while a stage works: lines, warnings, progress bars and tables.

The one module that prints. A bar is drawn on a terminal; elsewhere (a log file, a queue worker)
plain lines appear at most every five seconds, since redrawn bars turn into noise there.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_SECONDS_BETWEEN_LINES = 5.0
_UNLIMITED = 10_000


_copies: list[TextIO] = []


def _write(stream: TextIO, text: str) -> None:
    for file in (stream, *_copies):
        with contextlib.suppress(OSError):  # the terminal may be gone; the work goes on
            file.write(text + "\n")
            file.flush()


def say(text: str) -> None:
    """Writes one line to standard output and flushes it."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Writes one warning line to standard error."""
    _write(sys.stderr, f"warning: {text}")


@contextmanager
def copy_to(path: Path) -> Iterator[None]:
    """Appends every line said or warned of to a file too, for as long as the context lasts."""
    with path.open("a", encoding="utf-8") as file:
        _copies.append(file)
        try:
            yield
        finally:
            _copies.remove(file)


def fail(text: str) -> None:
    """Writes one error line to standard error."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()


class Counter:
    """Counts work done and shows it: the bar's face towards the code that works."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = 0
        self._before = 0
        self._more: dict[str, float] = {}
        self._started = time.monotonic()
        self._last_line = self._started
        self._bar: tuple[Progress, TaskID] | None = None

    def show_as_bar(self, bar: Progress) -> None:
        """Draws this counter in ``bar`` from now on."""
        self._bar = (
            bar,
            bar.add_task(self.description, total=self.total, unit=self.unit, rates=""),
        )

    def begin_at(self, amount: int) -> None:
        """Starts with ``amount`` units done before, which count for no rate."""
        self.done = self._before = amount
        self._started = time.monotonic()
        if self._bar is not None:
            bar, task = self._bar
            bar.reset(task, completed=amount)

    def advance(self, amount: int = 1, **more: float) -> None:
        """Adds ``amount`` units of finished work.

        Args:
            amount: how many units.
            more: other amounts that the same work was, by their units, such as ``tokens=512``;
                their rates are shown too.
        """
        self.done += amount
        for unit, value in more.items():
            self._more[unit] = self._more.get(unit, 0.0) + value
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, advance=amount, rates=", ".join(self._rates()))
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            say(self.line())

    def line(self) -> str:
        """The state as a plain line: done, total, rate and time left."""
        rate = (self.done - self._before) / self._seconds()
        text = f"{self.description}: {self.done:,}"
        if self.total:
            text += f" of {self.total:,}"
        text += ", ".join([f" {self.unit}", f"{rate:,.0f} {self.unit}/s", *self._rates()])
        if self.total and rate > 0 and self.done < self.total:
            text += f", {(self.total - self.done) / rate:.0f} s left"
        return text

    def _rates(self) -> list[str]:
        """The rates of the other amounts."""
        seconds = self._seconds()
        rates = {unit: amount / seconds for unit, amount in self._more.items()}
        return [
            f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.1f} {unit}/s"
            for unit, rate in rates.items()
        ]

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)


@contextmanager
def progress(description: str, total: int | None, unit: str) -> Iterator[Counter]:
    """Shows work in progress for as long as the context lasts.

    Args:
        description: what is being done, such as ``"tokenising"``.
        total: units of work in all, or None where that is unknown.
        unit: name of the unit in the plural, such as ``"documents"``.
    """
    counter = Counter(description, total, unit)
    if not sys.stderr.isatty():
        yield counter
        say(counter.line())
        return
    with _bar(sys.stderr) as bar:
        counter.show_as_bar(bar)
        yield counter


@contextmanager
def bar_on_terminal(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar below the lines that are said meanwhile; nothing where there is no terminal.

    Gives the function that advances it. For work that tells its progress in lines anyway.
    """
    if not sys.stdout.isatty():
        yield lambda _amount: None
        return
    with _bar(sys.stdout) as bar:
        task = bar.add_task(description, total=total, unit=unit, rates="")
        yield lambda amount: bar.advance(task, amount)


def _bar(stream: TextIO) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]} {task.fields[rates]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Lines said meanwhile stay whole: people search for the fields of the log line.
    return Progress(*columns, console=Console(file=stream, soft_wrap=True))


def table(title: str, rows: Sequence[Sequence[str]], headers: Sequence[str] = ()) -> None:
    """Prints a table: names and values, or columns under headers.

    Where columns under headers are too wide for the terminal, the frame goes first, then cells
    are folded. None is cut: half a number is a wrong one.
    """
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    grid = Table(title=title, show_header=bool(headers), title_justify="left")
    for header in headers or [""] * max(map(len, rows), default=0):
        grid.add_column(header, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    wanted = console.measure(grid, options=console.options.update(width=_UNLIMITED)).maximum
    if headers and wanted > console.width:
        grid.box, grid.padding = SIMPLE_HEAD, 0
    console.print(grid)
