"""Whether the micro batches of a run are replayed from CUDA graphs: where that is faster.

The result is the same, bit for bit; memory is not: what a recorded forward keeps for its backward
is held for good. So a run tries it, on GPUs, if there is room, and goes on with what was faster:

| step of the process | |
|---|---|
| 1 | not counted: kernels are loaded, communicators connect |
| 2, 3 | timed |
| 4 | not counted: graphs are recorded |
| 5, 6 | timed with them |

Where copies of the model share its state, the first micro batch of a step, which waits for the
parameters, and the last, whose gradients are reduced as they come, go kernel by kernel. Transfers
between pipeline stages are not part of a recording; the collectives of tensor parallelism are, so
that their process groups end only after the graphs do (``TrainingParts.close``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lib.checkpoint.ranks import gather, on_rank_zero, rank_and_size
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.console import say
from lib.layers.attention_choice import reason_of
from lib.model.loss import MicroBatch, run_chunk
from lib.parallel.groups import ParallelGroups
from lib.pipeline.graphs import CudaGraphs, Recording, Replayed
from lib.train.model_setup import ShardedModel

SETTLED_AFTER = 6  # steps; from then on a run is as fast as it will be
_RECORDED_AT = 4
_SOONER = 0.99  # of the time without graphs, or they are not worth their memory
_SHARE_OF_MEMORY = 0.92

Record = Callable[..., Recording]
Forward = Callable[[int, int, Tensor | None], Tensor]


def graphs_obstacle(
    config: RunConfig, runtime: RuntimeConfig, groups: ParallelGroups, device: torch.device
) -> str | None:
    """Why a run cannot be recorded; None if it can.

    A graph repeats what the host decided when it was recorded, so nothing may depend on a step:
    no random numbers, no borders of documents, no second shape.
    """
    model, data = config.model, config.data
    reasons = (
        (runtime.cuda_graphs == "off", "runtime.cuda_graphs is off"),
        (device.type != "cuda", "there is no GPU"),
        (model.hidden_dropout > 0 or model.attention_dropout > 0, "dropout draws random numbers"),
        (data.attention == "document" or data.positions == "document", "documents differ"),
        (len(data.phases) > 1, "phases differ in shape"),
        (groups.world.watch is not None, "launch.debug watches each call"),
        (
            config.parallel.sharding != "optimizer" and groups.shards.size > 1,
            f"parallel.sharding: {config.parallel.sharding} moves memory in each micro batch",
        ),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _memory() -> tuple[int, int, int]:
    peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[1], peak, kept


@dataclass
class StepGraphs:
    """The forwards of a run's steps: kernel by kernel, or replayed.

    Attributes:
        model: this rank's part.
        obstacle: why they are not replayed; None while that is open, or when they are.
        shares_state: whether copies of the model share its state.
        record: makes a recording.
        memory: bytes of the GPU, bytes that a step needs at most, and what stays between steps.
        clock: seconds.
    """

    model: ShardedModel
    obstacle: str | None
    shares_state: bool
    record: Record = CudaGraphs
    memory: Callable[[], tuple[int, int, int]] = _memory
    clock: Callable[[], float] = time.perf_counter
    _steps: int = 0
    _began: float = 0.0
    _without: list[float] = field(default_factory=list)  # seconds of steps
    _with: list[float] = field(default_factory=list)
    _replayed: dict[int, Replayed] = field(default_factory=dict)
    _failed: str | None = None  # why this rank could not record

    @property
    def is_on(self) -> bool:
        """Whether the present step is replayed."""
        return self.obstacle is None and self._failed is None and self._steps >= _RECORDED_AT

    def begin_step(self) -> None:
        """Before a step's first forward; called by all ranks."""
        self._steps += 1
        if self.obstacle is not None:
            return
        if self._steps == _RECORDED_AT and not self._has_room():
            self._give_up("it would take too much of the GPU's memory")
        if self._steps == SETTLED_AFTER + 1:
            self._decide()
        self._began = self.clock()

    def end_step(self) -> None:
        """When the step's loss is known."""
        timed = 1 < self._steps <= SETTLED_AFTER and self._steps != _RECORDED_AT
        if self.obstacle is None and timed:
            (self._with if self.is_on else self._without).append(self.clock() - self._began)

    def forward_of(self, batches: Sequence[MicroBatch]) -> Forward:
        """What runs chunk, number of the micro batch and received hidden states of a step."""

        def forward(chunk: int, number: int, received: Tensor | None) -> Tensor:
            batch = batches[number]
            is_end = self.shares_state and number in (0, len(batches) - 1)
            if not self.is_on or is_end:
                return run_chunk(self.model.chunk(chunk), batch, received)
            if chunk not in self._replayed:
                self._replayed[chunk] = Replayed(self._compute(chunk), self.record)
            inputs = (batch.tokens_SB, batch.labels_SB, batch.weights_SB)
            try:
                return self._replayed[chunk](inputs, received)
            except RuntimeError as error:  # of torch, for want of memory too, when it records
                self._failed = reason_of(error)
                return run_chunk(self.model.chunk(chunk), batch, received)

        return forward

    def _compute(self, chunk: int) -> Callable[[Sequence[Tensor], Tensor | None], Tensor]:
        def compute(inputs: Sequence[Tensor], received: Tensor | None) -> Tensor:
            tokens, labels, weights = inputs
            return run_chunk(
                self.model.chunk(chunk), MicroBatch(tokens, labels, weights, 0), received
            )

        return compute

    def _has_room(self) -> bool:
        """Whether what a step needs fits twice, or where all is replayed a little more than once.

        Validation and the update still take memory of their own.
        """
        total, peak, kept = self.memory()
        again = 1.0 if self.shares_state else 0.25
        needed = peak + again * (peak - kept)
        return all(gather(needed <= _SHARE_OF_MEMORY * total))

    def _decide(self) -> None:
        """Keeps the graphs if all ranks could record, and they are faster on rank 0."""
        failed = next((reason for reason in gather(self._failed) if reason is not None), None)
        if failed is not None:
            self._give_up(f"recording {failed}")
            return
        before, after = on_rank_zero(lambda: (min(self._without), min(self._with)))
        told = f"{before * 1e3:.4g} ms a step without, {after * 1e3:.4g} with"
        if after > _SOONER * before:
            self._give_up(f"no faster: {told}")
        elif rank_and_size()[0] == 0:
            say(f"CUDA graphs: on, {told}")

    def release(self) -> None:
        """Between steps, for good: lets go of recordings, which hold memory and communicators."""
        for replayed in self._replayed.values():
            replayed.release()
        self._replayed.clear()

    def _give_up(self, reason: str) -> None:
        self.obstacle = reason
        self.release()
        if rank_and_size()[0] == 0:
            say(f"CUDA graphs: off, {reason}")
