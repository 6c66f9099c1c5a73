"""Micro batches for each step, read ahead of the training loop.

Which samples a step reads is arithmetic in ``consumed_samples``; this module only fetches them.
A thread prepares the next steps while the current one computes. It draws no random numbers, so
the number of steps read ahead changes nothing.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from lib.config.batch_schedule import BatchSchedule
from lib.data.order import SampleOrder, step_positions
from lib.data.samples import SampleWindows
from lib.model.loss import MicroBatch, micro_batch
from lib.parallel.groups import Group


@dataclass(frozen=True)
class BatchShape:
    """How global batches are laid out.

    Attributes:
        micro_batch_size: samples that go through the model at once on one rank.
        schedule: samples of each step over all ranks.
        dp: the data-parallel group; all its ranks together read the global batch.
    """

    micro_batch_size: int
    schedule: BatchSchedule
    dp: Group

    def micro_batches(self, consumed_samples: int) -> int:
        """Micro batches of one rank in the step that begins after ``consumed_samples``."""
        per_round = self.micro_batch_size * self.dp.size
        rounds, rest = divmod(self.schedule.at(consumed_samples), per_round)
        assert rest == 0, "layout_for refuses batches that do not divide"
        return rounds

    def positions(self, consumed_samples: int) -> np.ndarray:
        """Positions this rank reads, int64 [micro_batches, micro_batch_size]."""
        return step_positions(
            consumed_samples,
            micro_batches=self.micro_batches(consumed_samples),
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp.rank,
            dp_size=self.dp.size,
        )


class TrainingBatches:
    """The micro batches of consecutive steps.

    Args:
        windows: the training split.
        order: in which its samples are read.
        shape: layout of the global batches.
        device: where the micro batches are wanted.
        prefetch: steps prepared ahead; 0 prepares each when it is asked for.
    """

    def __init__(
        self,
        windows: SampleWindows,
        order: SampleOrder,
        shape: BatchShape,
        device: torch.device,
        prefetch: int,
    ) -> None:
        self._windows = windows
        self._order = order
        self._shape = shape
        self._device = device
        self._prefetch = prefetch
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: deque[tuple[int, Future[list[MicroBatch]]]] = deque()
        self._following = 0

    def take(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro batches of the step that begins after ``consumed_samples``."""
        if not self._ahead or self._ahead[0][0] != consumed_samples:
            self._ahead.clear()
            self._request(consumed_samples)
        _, future = self._ahead.popleft()
        while len(self._ahead) < self._prefetch:
            self._request(self._following)
        return [batch.to(self._device) for batch in future.result()]

    def close(self) -> None:
        """Ends the reading thread."""
        self._reader.shutdown(cancel_futures=True)

    def _request(self, consumed_samples: int) -> None:
        self._ahead.append((consumed_samples, self._reader.submit(self._read, consumed_samples)))
        self._following = consumed_samples + self._shape.schedule.at(consumed_samples)

    def _read(self, consumed_samples: int) -> list[MicroBatch]:
        samples = self._order.samples_at(self._shape.positions(consumed_samples))
        batches = [
            micro_batch(self._windows.windows(row), np.ones(len(row), dtype=bool))
            for row in samples
        ]
        if self._device.type == "cuda":
            batches = [batch.pinned() for batch in batches]
        return batches


def validation_batches(
    windows: SampleWindows, order: SampleOrder, shape: BatchShape, num_samples: int
) -> list[MicroBatch]:
    """This rank's part of the first ``num_samples`` of a fixed order, on the CPU.

    The same samples at every validation and in every layout: where their number does not fill the
    last micro batches, fillers that do not count are added, the same number on every rank.
    """
    num_samples = min(num_samples, windows.num_samples)
    per_round = shape.micro_batch_size * shape.dp.size
    rounds = -(-num_samples // per_round)
    positions = step_positions(
        0,
        micro_batches=rounds,
        micro_batch_size=shape.micro_batch_size,
        dp_rank=shape.dp.rank,
        dp_size=shape.dp.size,
    )
    counted = positions < num_samples
    samples = np.where(counted, order.samples_at(np.minimum(positions, num_samples - 1)), -1)
    return [
        micro_batch(windows.windows(row), row_counted)
        for row, row_counted in zip(samples, counted, strict=True)
    ]
