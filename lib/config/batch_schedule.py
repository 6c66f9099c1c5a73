"""The global batch size of each step, by arithmetic in ``consumed_samples``.

With a ramp-up the batch grows from ``start`` to ``global_batch_size`` by ``increment`` each time
``samples`` / n samples more have been read, n being the number of increments: a step that begins
after c samples takes ``start + increment * floor(c n / samples)`` (Megatron's rule, in whole
numbers). A batch that begins before such a border may end behind it, so that two steps may lie
further apart than one increment. Without a ramp-up all steps are alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from lib.config.schema import TrainingShape


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes over a run; all numbers in samples.

    Attributes:
        global_batch_size: of a step when the ramp-up is over.
        start: of the first step.
        increment: growth at each border; divides ``global_batch_size - start``.
        samples: length of the ramp-up; 0 is none.
    """

    global_batch_size: int
    start: int
    increment: int
    samples: int

    @classmethod
    def constant(cls, global_batch_size: int) -> Self:
        """A schedule without a ramp-up."""
        return cls(global_batch_size, start=global_batch_size, increment=1, samples=0)

    @classmethod
    def of(cls, training: TrainingShape) -> Self:
        """The schedule of a training section that breaks no rule."""
        batch, start = training.global_batch_size, training.rampup_start_batch_size
        if start is None or training.rampup_increment is None or training.rampup_samples is None:
            return cls.constant(batch)
        return cls(batch, start, training.rampup_increment, training.rampup_samples)

    @property
    def has_rampup(self) -> bool:
        """Whether the batch grows at all."""
        return self.samples > 0

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after ``consumed_samples``."""
        if consumed_samples >= self.samples:
            return self.global_batch_size
        return self.start + self.increment * self._part(consumed_samples)

    def iterations(self, samples: int) -> int:
        """Steps that begin before ``samples``: the number of those that ``samples`` take."""
        begun = 0
        for first, batch, steps in self._runs():
            if first >= samples:
                break
            wanted = -(-(samples - first) // batch)
            begun += wanted if steps is None else min(steps, wanted)
        return begun

    def ends_near(self, samples: int) -> list[int]:
        """The ends of steps on both sides of ``samples``, or ``samples`` if a step ends there."""
        below = 0
        for first, batch, steps in self._runs():
            whole = (samples - first) // batch
            if steps is None or whole < steps:
                below = first + whole * batch
                break
        if below == samples:
            return [samples]
        return [end for end in (below, below + self.at(below)) if end > 0]

    def _part(self, consumed_samples: int) -> int:
        """Number of the increment, from 0, that ``consumed_samples`` of the ramp-up lie in."""
        return consumed_samples * self._increments // self.samples

    @property
    def _increments(self) -> int:
        return (self.global_batch_size - self.start) // self.increment

    def _runs(self) -> Iterator[tuple[int, int, int | None]]:
        """Steps of equal size: (samples before the first, size, steps); the last has no end."""
        first = 0
        while first < self.samples:
            batch = self.at(first)
            border = -(-(self._part(first) + 1) * self.samples // self._increments)
            steps = -(-(border - first) // batch)
            yield first, batch, steps
            first += steps * batch
        yield first, self.global_batch_size, None
