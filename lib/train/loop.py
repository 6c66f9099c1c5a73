"""THE training loop, top to bottom.

One step: read the micro batches, run the pipeline plan (forward and backward of each, gradients
reduced with the last), clip, set the learning rate, update. Then report, validate, save, as often
as the configuration says, and stop when asked to. The state of a run is its weights, the
optimizer's moments, the random streams and two counters: steps and consumed samples.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lib.console import say
from lib.errors import UserError
from lib.model.loss import MicroBatch, token_losses
from lib.optim.clipping import clip_gradients
from lib.optim.optimizer import set_learning_rate
from lib.parallel.collectives import all_reduce
from lib.parallel.data_parallel import reshard, set_gradient_sync
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import forward_only, one_forward_one_backward
from lib.train.metrics import StepRow, log_line, validation_lines
from lib.train.setup import TrainingParts

MAX_CONSECUTIVE_NAN = 10


@dataclass
class Progress:
    """Where a run stands; saved with every checkpoint.

    Attributes:
        iteration: finished optimizer steps.
        consumed_samples: samples of those steps.
        skipped: steps whose update was left out.
        nan: steps whose loss or gradient norm was not a finite number.
        nan_in_a_row: the latest such steps without a good one between.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    nan: int = 0
    nan_in_a_row: int = 0

    @classmethod
    def from_saved(cls, saved: object) -> Self:
        """What a checkpoint recorded of it."""
        assert isinstance(saved, dict)
        return cls(**saved)


@dataclass
class Hooks:
    """What the loop calls and does not do itself.

    Attributes:
        on_step: takes the row of every step.
        on_validation: takes (step, loss, perplexity, samples, tokens) as a row.
        save: writes a checkpoint of the current progress.
        stop_requested: whether any rank was asked to stop; the same answer on all ranks.
    """

    on_step: Callable[[StepRow], None]
    on_validation: Callable[[dict[str, object]], None]
    save: Callable[[Progress], None]
    stop_requested: Callable[[], bool]


def train(parts: TrainingParts, progress: Progress, hooks: Hooks) -> bool:
    """Trains until the configured number of steps, or until asked to stop.

    Args:
        parts: from ``lib.train.setup.build_training``.
        progress: where to go on from; updated in place.
        hooks: reporting, saving and stopping.

    Returns:
        True when all steps are done; False when stopped before, with a checkpoint saved.
    """
    training, checkpoint = parts.config.training, parts.config.checkpoint
    last_saved = progress.iteration
    since_last_line: list[StepRow] = []
    parts.model.train()
    while progress.iteration < training.train_iters:
        if hooks.stop_requested():
            if last_saved != progress.iteration:
                hooks.save(progress)
            return False
        row = train_step(parts, progress)
        hooks.on_step(row)
        since_last_line.append(row)
        if is_due(progress.iteration, parts.runtime.log_interval, training.train_iters):
            _say_on_first_rank(log_line(since_last_line, training.train_iters))
            since_last_line.clear()
        if is_due(progress.iteration, training.eval_interval, training.train_iters):
            validate(parts, progress, hooks)
        if is_due(progress.iteration, checkpoint.save_interval, training.train_iters):
            hooks.save(progress)
            last_saved = progress.iteration
    return True


def train_step(parts: TrainingParts, progress: Progress) -> StepRow:
    """One optimizer step over one global batch; advances ``progress``."""
    started = time.perf_counter()
    training = parts.config.training
    skipped_before, nan_before = progress.skipped, progress.nan
    batches = parts.batches.take(progress.consumed_samples)
    waited = time.perf_counter() - started
    num_tokens = _count_over_dp(parts, batches)
    pp = parts.groups.pp
    plan = one_forward_one_backward(pp.rank, pp.size, len(batches))
    losses = run_plan(
        plan,
        lambda number: token_losses(parts.model, batches[number]).sum(),
        grad_scale=1.0 / max(num_tokens, 1.0),
        before_backward=lambda is_last: set_gradient_sync(parts.model, is_last),
    )
    loss = _sum_over_dp(parts, torch.stack(losses).double().sum()) / max(num_tokens, 1.0)
    norm = clip_gradients(parts.parameters.values(), parts.config.optimizer.clip_grad, parts.groups)
    rate = parts.learning_rate.at(progress.consumed_samples, training.global_batch_size)
    if math.isfinite(loss) and math.isfinite(norm) and num_tokens > 0:
        set_learning_rate(parts.optimizer, rate)
        parts.optimizer.step()
        progress.nan_in_a_row = 0
    else:
        _count_bad_step(progress, loss, norm, is_nan=num_tokens > 0)
    parts.optimizer.zero_grad(set_to_none=True)
    progress.iteration += 1
    progress.consumed_samples += training.global_batch_size
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)
    seconds = time.perf_counter() - started
    rates = parts.throughput.of(seconds)
    return StepRow(
        step=progress.iteration,
        loss=loss,
        learning_rate=rate,
        grad_norm=norm,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_samples * training.seq_length,
        global_batch_size=training.global_batch_size,
        loss_scale=1.0,
        skipped=progress.skipped - skipped_before,
        nan=progress.nan - nan_before,
        step_ms=seconds * 1e3,
        data_wait_ms=waited * 1e3,
        tokens_per_second=rates.tokens_per_second,
        samples_per_second=rates.samples_per_second,
        tflops_per_gpu=rates.tflops_per_gpu,
        mfu=rates.mfu,
    )


def validate(parts: TrainingParts, progress: Progress, hooks: Hooks) -> None:
    """Measures the loss on the validation samples, in nats per token; training is not disturbed.

    It draws no random numbers and leaves dropout as it was, so the course of training does not
    depend on how often this runs.
    """
    if not parts.validation:
        return
    parts.model.eval()
    total, tokens = summed_loss(parts, parts.validation)
    reshard(parts.model)
    parts.model.train()
    loss = total / tokens
    perplexity = math.exp(min(20.0, loss))
    seq_length = parts.config.training.seq_length
    hooks.on_validation(
        {
            "step": progress.iteration,
            "loss": loss,
            "perplexity": perplexity,
            "samples": int(tokens) // seq_length,
            "tokens": int(tokens),
        }
    )
    _say_on_first_rank(validation_lines(progress.iteration, loss, perplexity))


def summed_loss(parts: TrainingParts, batches: list[MicroBatch]) -> tuple[float, float]:
    """Sum of token losses and number of counted tokens over all data-parallel ranks."""
    losses = run_plan(
        forward_only(len(batches)),
        lambda number: token_losses(parts.model, batches[number].to(parts.device)).sum(),
    )
    total = _sum_over_dp(parts, torch.stack(losses).double().sum())
    return total, _count_over_dp(parts, batches)


def is_due(iteration: int, interval: int, last: int) -> bool:
    """Whether something with this interval happens after this step: also after the last one.

    An interval of 0 means only after the last step for saving and logging; validation that is
    off has nothing to do then.
    """
    return iteration == last or (interval > 0 and iteration % interval == 0)


def _sum_over_dp(parts: TrainingParts, value: Tensor) -> float:
    return all_reduce(value, parts.groups.dp).item()


def _count_over_dp(parts: TrainingParts, batches: list[MicroBatch]) -> float:
    """Counted tokens of all ranks; over gloo, so that no GPU is waited for before a step."""
    count = torch.tensor(float(sum(batch.num_tokens for batch in batches)), dtype=torch.float64)
    return all_reduce(count, parts.groups.dp).item()


def _say_on_first_rank(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        say(text)


def _count_bad_step(progress: Progress, loss: float, norm: float, *, is_nan: bool) -> None:
    progress.skipped += 1
    if not is_nan:
        return
    progress.nan += 1
    progress.nan_in_a_row += 1
    if progress.nan_in_a_row >= MAX_CONSECUTIVE_NAN:
        raise UserError(
            f"{progress.nan_in_a_row} steps in a row up to step {progress.iteration + 1} gave no "
            f"finite numbers (loss {loss}, gradient norm {norm}): the run has diverged. Lower "
            "optimizer.lr, lengthen the warm-up or set optimizer.clip_grad (which is another run, "
            "from step 0; the checkpoints of this one stay)"
        )
