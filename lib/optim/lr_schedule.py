"""The learning rate as a pure function of the samples consumed.

Nothing to step, save or restore: a resumed run, another layout and a batch ramp-up give the same
rate at the same sample. With n consumed samples *before* the step, w warm-up and d decay samples,
and b samples in the step:

    n < w:           max * (n + b) / (w + b)   warm-up: the first step has a rate above 0, and
                                               the peak comes once, at the first step after it
    w <= n < d:      min + c(r) * (max - min),  r = (n - w) / (d - w)
    n >= d:          min                   (constant: max for ever)

    cosine c = (1 + cos(pi r)) / 2       linear c = 1 - r       constant c = 1
    wsd    c = 1 until the tail of t samples before d, then over the tail's own 0 <= u < 1:
           linear 1 - u, cosine (1 + cos(pi u)) / 2, exponential 2 * 0.5^u - 1,
           minus_sqrt 1 - sqrt(u)

(The decay forms are Megatron's.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """A learning rate schedule; counts are samples.

    Attributes:
        max_lr: rate of the first step after the warm-up.
        min_lr: rate after the decay.
        decay: ``cosine``, ``linear``, ``constant`` or ``wsd``.
        warmup_samples: length of the warm-up.
        decay_samples: where the decay ends, counted from the start of training.
        wsd_decay_samples: length of the tail of ``wsd``.
        wsd_style: form of the tail: ``linear``, ``cosine``, ``exponential`` or ``minus_sqrt``.
    """

    max_lr: float
    min_lr: float
    decay: str
    warmup_samples: int
    decay_samples: int
    wsd_decay_samples: int = 0
    wsd_style: str = "linear"

    def at(self, consumed_samples: int, batch_samples: int) -> float:
        """The rate of the step that begins after ``consumed_samples``.

        Args:
            consumed_samples: samples of all earlier steps, skipped ones included.
            batch_samples: samples of this step.
        """
        if consumed_samples < self.warmup_samples:
            reached = consumed_samples + batch_samples
            return self.max_lr * reached / (self.warmup_samples + batch_samples)
        if self.decay == "constant":
            return self.max_lr
        if consumed_samples >= self.decay_samples:
            return self.min_lr
        return self.min_lr + self._coefficient(consumed_samples) * (self.max_lr - self.min_lr)

    def _coefficient(self, consumed_samples: int) -> float:
        if self.decay == "wsd":
            tail_start = self.decay_samples - self.wsd_decay_samples
            if consumed_samples < tail_start:
                return 1.0
            return decay_form(
                self.wsd_style, (consumed_samples - tail_start) / self.wsd_decay_samples
            )
        length = self.decay_samples - self.warmup_samples
        return decay_form(self.decay, (consumed_samples - self.warmup_samples) / length)


def decay_form(name: str, progress: float) -> float:
    """The factor of a decay form at ``0 <= progress < 1``: from 1 towards 0."""
    forms: dict[str, Callable[[float], float]] = {
        "linear": lambda r: 1.0 - r,
        "cosine": lambda r: 0.5 * (1.0 + math.cos(math.pi * r)),
        "exponential": lambda r: 2.0 * 0.5**r - 1.0,
        "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
    }
    return forms[name](progress)
