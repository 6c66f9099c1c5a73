"""The log of a run as data: one JSON object a line, exact after a resume.

Rows live in the state directory, not in ``results/``: those files are deleted before every run
and are written anew from here. A resume cuts the rows after its checkpoint, so each step has one
row however often the run was killed.
"""

import json
from pathlib import Path

from lib.atomic import sync_file, write_bytes_atomically
from lib.errors import UserError

HISTORY = "history.jsonl"

Row = dict[str, object]


class History:
    """The rows of a state directory.

    A row has a ``kind`` (``train`` or ``valid``), an ``iteration``, and what else its kind needs.
    Call `truncate` before the first `append`: it also mends a file whose last line was cut off.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / HISTORY

    def truncate(self, iteration: int) -> None:
        """Cuts the rows after ``iteration``, and a last line that was never completed."""
        kept = [row for row in self._read() if _iteration(row) <= iteration]
        write_bytes_atomically(self.path, b"".join(map(_line, kept)))

    def append(self, row: Row) -> None:
        """Adds one row."""
        try:
            with self.path.open("ab") as file:
                file.write(_line(row))
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from error

    def rows(self, kind: str, up_to: int) -> list[Row]:
        """The rows of one kind up to an iteration, in order, one for each iteration.

        A run that was made shorter and then went on has rows of two passes over the same
        iterations, which are equal but for their times: the later one counts.
        """
        latest = {_iteration(row): row for row in self._read() if row["kind"] == kind}
        return [latest[iteration] for iteration in sorted(latest) if iteration <= up_to]

    def sync(self) -> None:
        """Forces the rows to the disk; called before a checkpoint that relies on them."""
        if self.path.exists():
            sync_file(self.path)

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        try:
            *lines, _unfinished = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read: {error.strerror}; restore the file, or remove it "
                "(results/train.csv will begin at the present step)"
            ) from error
        rows = []
        for number, line in enumerate(lines, start=1):
            row = _parse(line)
            if row is None:
                raise UserError(
                    f"{self.path}:{number} is damaged; restore the file, or remove that line "
                    "(results/train.csv will lack it)"
                )
            rows.append(row)
        return rows


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and "kind" in row and isinstance(row.get("iteration"), int)
    return row if whole else None


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _iteration(row: Row) -> int:
    iteration = row["iteration"]
    assert isinstance(iteration, int)
    return iteration
