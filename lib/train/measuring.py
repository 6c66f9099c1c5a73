"""A training run on random tokens whose steps are taken one by one, for measuring.

Model, optimizer, data path and step are those of a real run: only who calls the step is another.
"""

import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.checkpoint.run_data import training_samples
from lib.config.launch_plan import layout_for
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.config.schema import ModelConfig
from lib.model.initialization import initial_parts, initial_value
from lib.model.loss import SampleRules
from lib.parallel.random import named_generator
from lib.parallel.storage import Cut
from lib.train.batches import Reading, TrainingBatches
from lib.train.chosen_attention import with_chosen_attention
from lib.train.metrics import StepRow
from lib.train.model_setup import Draw
from lib.train.setup import build_training, set_determinism
from lib.train.step import Progress, train_step

_DRAWN = 1_000_003  # numbers; a prime, so that rows of a matrix differ


def repeated_parts(
    cuts: Mapping[str, Cut], config: ModelConfig, *, vocab_size: int, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """As ``initial_parts``, but the same random numbers over and over.

    For measurements that no value matters to: drawing seven billion takes a minute.
    """
    drawn = torch.empty(_DRAWN).normal_(
        0.0, config.init_std, generator=named_generator(seed, "init", "repeated")
    )
    for name, cut in cuts.items():
        shape = cut.held_shape
        if len(shape) == 1:
            yield name, initial_value(name, shape, config, vocab_size=vocab_size, seed=seed)
        else:
            size = math.prod(shape)
            yield name, drawn.repeat(-(-size // _DRAWN))[:size].view(shape)


class MeasuredTraining:
    """One rank's part of a run, in a process group of all ranks; a context, which ends it.

    Args:
        config: the run; ``config.parallel`` is the layout.
        runtime: attention, recomputation and reading.
        device: where this rank computes.
        draw: gives the initial values, as ``initial_parts`` does.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: RuntimeConfig,
        device: torch.device,
        draw: Draw = initial_parts,
    ) -> None:
        set_determinism(runtime)
        layout = layout_for(config, dist.get_world_size())
        self.runtime = with_chosen_attention(runtime, config, device, None)
        self.parts = build_training(config, self.runtime, device, layout, draw=draw)
        self.parts.model.chunks.train()
        self.progress = Progress()
        self.rows: list[StepRow] = []

    def __enter__(self) -> Self:
        """Nothing more to begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the readers, and lets go of the model."""
        self.parts.close()
        del self.parts

    def step(self) -> float:
        """Takes the next step; gives the loss, nats per token. A GPU may still be updating."""
        row = train_step(self.parts, self.progress)
        self.rows.append(row)
        return row.loss

    def whole_weights(self) -> dict[str, Tensor]:
        """Copies of the masters by global name, where one rank holds all of the model."""
        assert self.parts.groups.tp.size == self.parts.groups.pp.size == 1
        found: dict[str, Tensor] = {}
        for name, master in self.parts.model.parameters.items():
            assert isinstance(master, DTensor)
            found[name] = master.full_tensor().detach().clone()
        return found

    def batches_from_start(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The micro batches that this rank's steps read, as (tokens, labels), int64 [B, S].

        Read a second time by readers of their own, which end with the iterator.
        """
        config, shape = self.parts.config, self.parts.shape
        reading = Reading(SampleRules.of(config.data), self.parts.device)
        batches = TrainingBatches(training_samples(config), shape, reading)
        consumed = 0
        try:
            while True:
                yield [(each.tokens_SB.t(), each.labels_SB.t()) for each in batches.take(consumed)]
                consumed += shape.schedule.at(consumed)
        finally:
            batches.close()
