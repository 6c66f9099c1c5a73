"""What is told of timed kernels: a table for each model, and a line of JSON per pass."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib.console import table

NOT_INSTALLED, NO_MEMORY, FAILED = "not installed", "no memory", "failed"
OURS, OTHERS = "drydock", ("torch", "compiled", "Liger")
HEADERS = ("kernel", "pass", OURS, *OTHERS, "of copy", "/ ours")


@dataclass
class KernelTimes:
    """One operation.

    Attributes:
        kernel: name of the module in ``kernels``.
        milliseconds: of each pass, by the way.
        moved: bytes that each pass must read or write.
        without: why a way has no times, by its name.
    """

    kernel: str
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Names of the ways that failed."""
        return [f"{self.kernel} ({way})" for way, why in self.without.items() if why == FAILED]


@dataclass(frozen=True)
class Conditions:
    """Of all kernels of a table.

    Attributes:
        shape: name of the model.
        tokens: samples of the micro batch, and tokens of a sample.
        dtype: number type.
        device: its name.
        copy_rate: bytes that a large copy reads and writes in a second there.
    """

    shape: str
    tokens: tuple[int, int]
    dtype: str
    device: str
    copy_rate: float


def tell(found: Sequence[KernelTimes], conditions: Conditions, json_file: Path | None) -> None:
    """Shows the table and appends to the file."""
    batch, length = conditions.tokens
    title = (
        f"{conditions.shape}: {batch} x {length} tokens, {conditions.dtype}; milliseconds on "
        f"{conditions.device}, which copies at {conditions.copy_rate / 1e9:,.0f} GB/s"
    )
    rows = [row for each in found for row in kernel_rows(each, conditions.copy_rate)]
    table(title, rows, headers=HEADERS)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        with json_file.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for each in found for line in json_lines(each, conditions))


def kernel_rows(found: KernelTimes, copy_rate: float) -> list[tuple[str, ...]]:
    """A line for each pass under ``HEADERS``.

    "Of copy" is the time that a copy of as many bytes as must move would take, over ours; the last
    column is the least time of another way over ours.
    """
    rows: list[tuple[str, ...]] = []
    nothing: dict[str, dict[str, float]] = {"": {}}
    for which, by_way in (found.milliseconds or nothing).items():
        cells = [
            f"{by_way[way]:.3f}" if way in by_way else found.without.get(way, "")
            for way in (OURS, *OTHERS)
        ]
        share = ratio = ""
        if ours := by_way.get(OURS):
            share = f"{found.moved[which] / copy_rate * 1e3 / ours:.0%}"
            others = [by_way[way] for way in OTHERS if way in by_way]
            ratio = f"{min(others) / ours:.2f}" if others else ""
        rows.append((found.kernel, which, *cells, share, ratio))
    return rows


def json_lines(found: KernelTimes, conditions: Conditions) -> Iterator[str]:
    """A line for each pass."""
    for which, by_way in found.milliseconds.items():
        yield json.dumps(
            asdict(conditions)
            | {
                "kernel": found.kernel,
                "pass": which,
                "milliseconds": by_way,
                "moved_bytes": found.moved[which],
                "without": found.without,
            }
        )
