"""Micro batches for each step, read ahead of the training loop.

Which samples a step reads is arithmetic in ``consumed_samples``; this module only fetches them.
Threads prepare the next micro batches while the current ones are computed. They draw no random
numbers, so neither their number nor how far they are ahead changes anything.

Only the ends of the model read tokens: its first stage the inputs, its last the labels. A stage in
the middle receives hidden states, and at most needs to know where documents begin.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lib.config.batch_schedule import BatchSchedule
from lib.config.data_facts import Phase
from lib.data.blended_samples import BlendedSamples
from lib.data.order import SampleOrder, step_positions
from lib.data.samples import SampleWindows
from lib.model.loss import MicroBatch, SampleRules, micro_batch
from lib.parallel.groups import Group


@dataclass(frozen=True)
class BatchShape:
    """How global batches are laid out.

    Attributes:
        phases: parts of the training, each with its lengths; every one begins with a step.
        schedule: samples of each step over all ranks.
        dp: the data-parallel group; all its ranks together read the global batch.
    """

    phases: tuple[Phase, ...]
    schedule: BatchSchedule
    dp: Group

    def phase(self, consumed_samples: int) -> Phase:
        """The part of the training that the step after ``consumed_samples`` belongs to."""
        return [each for each in self.phases if each.from_samples <= consumed_samples][-1]

    def micro_batches(self, consumed_samples: int) -> int:
        """Micro batches of one rank in the step that begins after ``consumed_samples``."""
        per_round = self.phase(consumed_samples).micro_batch_size * self.dp.size
        rounds, rest = divmod(self.schedule.at(consumed_samples), per_round)
        assert rest == 0, "layout_for refuses batches that do not divide"
        return rounds

    def positions(self, consumed_samples: int) -> npt.NDArray[np.int64]:
        """Positions this rank reads, int64 [micro_batches, micro_batch_size]."""
        return step_positions(
            consumed_samples,
            micro_batches=self.micro_batches(consumed_samples),
            micro_batch_size=self.phase(consumed_samples).micro_batch_size,
            dp_rank=self.dp.rank,
            dp_size=self.dp.size,
        )


@dataclass(frozen=True)
class Reading:
    """How a rank reads.

    Attributes:
        rules: what counts in the loss, and what becomes of positions and attention at the borders
            of documents.
        device: where the micro batches are wanted.
        reads_tokens: whether it holds an end of the model; the others get zeros for tokens.
        num_workers: threads that read.
        prefetch: steps prepared ahead; 0 prepares each when it is asked for.
    """

    rules: SampleRules
    device: torch.device
    reads_tokens: bool = True
    num_workers: int = 1
    prefetch: int = 2

    def read(
        self,
        samples: BlendedSamples,
        positions: npt.NDArray[np.int64],
        counted: npt.NDArray[np.bool_],
        seq_length: int,
    ) -> MicroBatch:
        """The micro batch of some positions, on the CPU.

        Args:
            samples: to read from.
            positions: int64 [B], all of one phase; a negative one is a filler.
            counted: bool [B]; a sample that only fills the batch does not count.
            seq_length: of that phase.
        """
        if self.reads_tokens:
            windows = samples.windows_at(positions)
        else:
            windows = np.zeros((len(positions), seq_length + 1), dtype=np.int64)
        starts = samples.starts_at(positions) if self.rules.need_starts else None
        return micro_batch(windows, counted, self.rules, starts)


class TrainingBatches:
    """The micro batches of consecutive steps.

    Args:
        samples: of the training.
        shape: layout of the global batches.
        reading: how this rank reads.
    """

    def __init__(self, samples: BlendedSamples, shape: BatchShape, reading: Reading) -> None:
        self._samples = samples
        self._shape = shape
        self._reading = reading
        self._readers = ThreadPoolExecutor(reading.num_workers, thread_name_prefix="batches")
        self._ahead: deque[tuple[int, list[Future[MicroBatch]]]] = deque()
        self._following = 0

    def take(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro batches of the step that begins after ``consumed_samples``."""
        if not self._ahead or self._ahead[0][0] != consumed_samples:
            self._ahead.clear()
            self._request(consumed_samples)
        _, futures = self._ahead.popleft()
        while len(self._ahead) < self._reading.prefetch:
            self._request(self._following)
        return [future.result().to(self._reading.device) for future in futures]

    def close(self) -> None:
        """Ends the reading threads."""
        self._readers.shutdown(cancel_futures=True)

    def _request(self, consumed_samples: int) -> None:
        seq_length = self._shape.phase(consumed_samples).seq_length
        rows = self._shape.positions(consumed_samples)
        futures = [self._readers.submit(self._read, row, seq_length) for row in rows]
        self._ahead.append((consumed_samples, futures))
        self._following = consumed_samples + self._shape.schedule.at(consumed_samples)

    def _read(self, positions: npt.NDArray[np.int64], seq_length: int) -> MicroBatch:
        counted = np.ones(len(positions), dtype=bool)
        batch = self._reading.read(self._samples, positions, counted, seq_length)
        return batch.pinned() if self._reading.device.type == "cuda" else batch


@dataclass(frozen=True)
class ValidationSet:
    """This rank's part of the samples of one validation set.

    Attributes:
        name: of its corpus.
        samples: how many count, over all ranks.
        batches: micro batches on the CPU, equally many on every rank.
    """

    name: str
    samples: int
    batches: Sequence[MicroBatch]


def validation_set(
    name: str, windows: SampleWindows, seed: int, wanted: int, parts: tuple[BatchShape, Reading]
) -> ValidationSet:
    """Reads this rank's part of the first ``wanted`` samples of a fixed order.

    The same samples at every validation and in every layout: where their number does not fill the
    last micro batches, fillers that do not count are added, the same number on every rank. Lengths
    are those of the first phase, so that losses can be compared throughout.

    Args:
        name: of the corpus.
        windows: its samples; at least one where any is wanted.
        seed: of the order.
        wanted: samples to measure; all of a set that has fewer.
        parts: layout of the batches, and how this rank reads.
    """
    shape, reading = parts
    num_samples = min(wanted, windows.num_samples)
    micro_batch_size = shape.phases[0].micro_batch_size
    positions = step_positions(
        0,
        micro_batches=-(-num_samples // (micro_batch_size * shape.dp.size)),
        micro_batch_size=micro_batch_size,
        dp_rank=shape.dp.rank,
        dp_size=shape.dp.size,
    )
    counted = positions < num_samples
    order = SampleOrder.of_one(windows.num_samples, seed, name, "valid")
    samples = BlendedSamples([[windows]], order)
    batches = [
        reading.read(samples, np.where(row_counted, row, -1), row_counted, windows.seq_length)
        for row, row_counted in zip(positions, counted, strict=True)
    ]
    return ValidationSet(name, num_samples, batches)
