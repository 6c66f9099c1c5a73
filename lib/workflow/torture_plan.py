"""What is done to a run under torture, as data: drawn from a seed before anything starts.

A blow has a moment, a target and a signal. Drawing is pure, so that a run of the torture that
found a fault can be repeated blow by blow (the instants within a step are the machine's own).
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Target = Literal["rank", "torchrun", "launcher", "dvc", "group", "everyone"]
Signal = Literal["KILL", "TERM", "INT", "USR2", "STOP+CONT", "STOP+KILL"]
Moment = Literal["start", "step", "save", "publish"]
Through = Literal["dvc", "pretrain", "pipeline"]

TARGETS: tuple[Target, ...] = ("rank", "torchrun", "launcher", "dvc", "group", "everyone")
_TARGET_WEIGHTS = (5, 2, 3, 2, 2, 2)
SIGNALS: tuple[Signal, ...] = ("KILL", "TERM", "INT", "USR2", "STOP+CONT", "STOP+KILL")
_SIGNAL_WEIGHTS = (8, 4, 2, 1, 2, 1)
MOMENTS: tuple[Moment, ...] = ("start", "step", "save", "publish")
_MOMENT_WEIGHTS = (3, 8, 7, 2)
# DVC takes 3 seconds to start, so most runs do without.
_SHARE_OF_DVC = 0.2
_MOST_STEPS = 40
_MOST_SAVES = 3
_LONGEST_STOP_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One thing that is done to a running training.

    Attributes:
        moment: ``start``: within the seconds before the first step; ``step``: a number of steps
            after the start; ``save``: while a checkpoint is half written (hits the saver);
            ``publish``: while the model is, or soon after.
        target: who is hit: one process by its role, ``group`` as a terminal does it (dvc and the
            launcher; torchrun and ranks have groups of their own), ``everyone`` at once.
        signal: ``STOP+CONT`` and ``STOP+KILL`` let some seconds pass in between.
        through: what is started, should nothing run: ``dvc repro pretrain`` or the stage alone.
        count: steps to wait for, or which save it is to be.
        fraction: in [0, 1): when exactly within its moment, and which of several ranks.
        stopped_s: seconds between STOP and what follows.
    """

    moment: Moment = "step"
    target: Target = "rank"
    signal: Signal = "KILL"
    through: Through = "pretrain"
    count: int = 1
    fraction: float = 0.0
    stopped_s: float = 1.0

    @property
    def ends_the_run(self) -> bool:
        """Whether it must end: a pause does not, nor does what DVC and torchrun let pass.

        DVC ignores a SIGINT that only it gets; torchrun here hears SIGTERM alone.
        """
        passed_over = {"dvc": ("INT",), "torchrun": ("INT", "USR2")}
        return self.signal != "STOP+CONT" and self.signal not in passed_over.get(self.target, ())

    @property
    def asks(self) -> bool:
        """Whether it asks to stop, so that every step done until then must be saved."""
        asking = self.signal in ("TERM", "INT", "USR2")
        return asking and self.ends_the_run and self.moment != "start"

    def label(self) -> str:
        """Such as ``KILL rank at save``."""
        return f"{self.signal} {self.target} at {self.moment}"


def draw_blows(seed: int, count: int) -> list[Blow]:
    """So many blows; the same for the same seed, and the first ones for any count."""
    source = random.Random(seed)
    return [_draw(source) for _ in range(count)]


def _draw(source: random.Random) -> Blow:
    (moment,) = source.choices(MOMENTS, _MOMENT_WEIGHTS)
    (target,) = source.choices(TARGETS, _TARGET_WEIGHTS)
    (signal,) = source.choices(SIGNALS, _SIGNAL_WEIGHTS)
    through: Through = "dvc" if source.random() < _SHARE_OF_DVC or target == "dvc" else "pretrain"
    most = _MOST_SAVES if moment == "save" else _MOST_STEPS
    return Blow(
        moment=moment,
        target=target,
        signal=signal,
        through=through,
        count=source.randint(1, most),
        fraction=source.random(),
        stopped_s=source.uniform(0.2, _LONGEST_STOP_S),
    )


def crossed(pairs: Iterable[tuple[str, str]], columns: Iterable[str]) -> list[tuple[str, ...]]:
    """Counts pairs as a table: a row for each first name, a column for each second, and sums."""
    counts = Counter(pairs)
    names = list(columns)
    rows = []
    for row in dict.fromkeys(first for first, _ in counts):
        here = [counts[row, column] for column in names]
        rows.append((row, *(str(count or "") for count in here), str(sum(here))))
    sums = [sum(n for (_, second), n in counts.items() if second == name) for name in names]
    return [*sorted(rows), ("all", *map(str, sums), str(sum(sums)))]
