"""THE training loop, top to bottom.

Steps (``lib.train.step``) until the end; after each report, validate, save, as often as the
configuration says, and stop when asked to. The state of a run is its weights, the optimizer's
moments, the random streams, the loss scale and two counters: steps and consumed samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lib.console import say
from lib.data.order import SampleOrder
from lib.model.loss import MicroBatch, run_chunk
from lib.optim.gradient_statistics import gradient_statistics
from lib.pipeline.executor import run_plan
from lib.pipeline.plan import stage_plan
from lib.train.metrics import StepRow, log_line, loss_column, perplexity, validation_lines
from lib.train.setup import TrainingParts
from lib.train.step import Progress, sum_losses, train_step


@dataclass
class Hooks:
    """What the loop calls and does not do itself.

    Attributes:
        on_step: takes the row of every step.
        on_validation: takes (step, loss, perplexity, samples, tokens) as a row, and the loss on
            each set where there are several.
        on_gradients: takes the rows of ``runtime.gradient_statistics``; none but on rank 0.
        save: saves a checkpoint of the current progress, perhaps while training goes on.
        stop_requested: whether any rank was asked to stop; the same answer on all ranks. Raises
            where a save that went on meanwhile has failed.
    """

    on_step: Callable[[StepRow], None]
    on_validation: Callable[[dict[str, object]], None]
    on_gradients: Callable[[list[dict[str, object]]], None]
    save: Callable[[Progress], None]
    stop_requested: Callable[[], bool]


def train(parts: TrainingParts, progress: Progress, hooks: Hooks) -> bool:
    """Trains until the configured number of steps, or until asked to stop.

    Args:
        parts: from ``lib.train.setup.build_training``.
        progress: where to go on from; updated in place.
        hooks: reporting, saving and stopping.

    Returns:
        True when all steps are done; False when stopped before. All that was done is saved, or
        being saved.
    """
    training, checkpoint = parts.config.training, parts.config.checkpoint
    last_saved = progress.iteration
    since_last_line: list[StepRow] = []
    parts.model.chunks.train()
    while progress.iteration < training.train_iters:
        if hooks.stop_requested():
            if last_saved != progress.iteration:
                hooks.save(progress)
            return False
        observe = None
        if is_due(progress.iteration + 1, parts.runtime.gradient_statistics, 0):
            observe = partial(_observe_gradients, parts, progress.iteration + 1, hooks)
        row = train_step(parts, progress, observe)
        hooks.on_step(row)
        since_last_line.append(row)
        if is_due(progress.iteration, parts.runtime.log_interval, training.train_iters):
            _say_on_first_rank(log_line(since_last_line, training.train_iters))
            since_last_line.clear()
        if _ends_a_phase(parts, progress):
            _say_on_first_rank(_what_was_read(parts.order, progress))
        if is_due(progress.iteration, training.eval_interval, training.train_iters):
            validate(parts, progress, hooks)
        if is_due(progress.iteration, checkpoint.save_interval, training.train_iters):
            hooks.save(progress)
            last_saved = progress.iteration
    return True


def validate(parts: TrainingParts, progress: Progress, hooks: Hooks) -> None:
    """Measures the loss on the validation sets, in nats per token; training is not disturbed.

    It draws no random numbers and leaves dropout as it was, so the course of training does not
    depend on how often this runs.
    """
    if not parts.validation:
        return
    parts.model.chunks.eval()
    sums = {each.name: summed_loss(parts, each.batches) for each in parts.validation}
    parts.model.chunks.train()
    tokens = sum(counted for _, counted in sums.values())
    loss = sum(total for total, _ in sums.values()) / max(1.0, tokens)
    sets: dict[str, float] = {}
    if len(sums) > 1:
        sets = {name: total / max(1.0, counted) for name, (total, counted) in sums.items()}
    hooks.on_validation(
        {
            "step": progress.iteration,
            "loss": loss,
            "perplexity": perplexity(loss),
            "samples": sum(each.samples for each in parts.validation),
            "tokens": int(tokens),
        }
        | {loss_column(name): value for name, value in sets.items()}
    )
    _say_on_first_rank(validation_lines(progress.iteration, loss, sets))


def summed_loss(parts: TrainingParts, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """Sum of token losses and number of counted tokens over all data-parallel ranks."""
    pp, chunks = parts.groups.pp, len(parts.model.chunks)
    parts.model.data_parallel.start(trains=False)
    losses = run_plan(
        stage_plan(pp.rank, pp.size, chunks, len(batches), trains=False),
        lambda chunk, number, received: run_chunk(
            parts.model.chunk(chunk), batches[number].to(parts.device), received
        ),
        parts.at(0).links,
    )
    total, counted = sum_losses(parts, losses, batches).tolist()
    return total, counted


def is_due(iteration: int, interval: int, last: int) -> bool:
    """Whether something with this interval happens after this step: also after the last one.

    An interval of 0 means only after the last step for saving and logging; validation that is
    off has nothing to do then.
    """
    return iteration == last or (interval > 0 and iteration % interval == 0)


def _observe_gradients(parts: TrainingParts, step: int, hooks: Hooks, loss_scale: float) -> None:
    """Reports the statistics of the gradients of a step, before they are clipped."""
    own = parts.model.own_parameters()
    rows = gradient_statistics(own, parts.groups, loss_scale=loss_scale)
    hooks.on_gradients([{"step": step, **row} for row in rows])


def _ends_a_phase(parts: TrainingParts, progress: Progress) -> bool:
    starts = {phase.from_samples for phase in parts.config.data.phases}
    is_last = progress.iteration == parts.config.training.train_iters
    return is_last or progress.consumed_samples in starts


def _what_was_read(order: SampleOrder, progress: Progress) -> str:
    """How many samples of each corpus the run has drawn, and their shares."""
    samples = progress.consumed_samples
    drawn = zip(order.names, order.draws_before(samples), strict=True)
    told = (f"{name} {count:,} ({count / samples:.1%})" for name, count in drawn)
    return f"{samples:,} samples were read up to step {progress.iteration}: {', '.join(told)}"


def _say_on_first_rank(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        say(text)
