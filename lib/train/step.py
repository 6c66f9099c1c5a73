"""One optimizer step over one global batch.

Read the micro batches, run the pipeline plan (forward and backward of each, gradients reduced
with the last), add up what two stages share, clip, set the learning rate, update.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lib.errors import UserError
from lib.model.loss import MicroBatch
from lib.optim.clipping import clipping_divisor, squared_norm
from lib.optim.optimizer import set_learning_rate, update
from lib.parallel.collectives import all_reduce
from lib.pipeline.communication import Links
from lib.pipeline.executor import run_plan
from lib.pipeline.plan import stage_plan
from lib.train.metrics import StepRow
from lib.train.model_setup import sum_tied_gradients
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


def train_step(
    parts: TrainingParts, progress: Progress, observe: Callable[[float], None] | None = None
) -> StepRow:
    """One optimizer step; advances ``progress``.

    Args:
        parts: from ``lib.train.setup.build_training``.
        progress: where the run stands.
        observe: called with the loss scale once the gradients (times that scale) are complete,
            before they are clipped.
    """
    started = time.perf_counter()
    parts.graphs.begin_step()
    batch_size = parts.shape.schedule.at(progress.consumed_samples)
    skipped_before, nan_before = progress.skipped, progress.nan
    batches = parts.batches.take(progress.consumed_samples)
    waited = time.perf_counter() - started
    scale = parts.loss_scale.scale
    sums = forward_backward(parts, batches, parts.at(progress.consumed_samples).links)
    if observe is not None:
        observe(scale)
    rate = parts.learning_rate.at(progress.consumed_samples, batch_size)
    set_learning_rate(parts.optimizer, rate)
    loss, norm, is_empty = _update(parts, sums, scale)
    parts.graphs.end_step()
    _count(parts, progress, loss, norm, is_empty=is_empty)
    progress.iteration += 1
    progress.consumed_samples += batch_size
    seconds = time.perf_counter() - started
    rates = parts.at(progress.consumed_samples - batch_size).throughput.of(seconds, batch_size)
    return StepRow(
        step=progress.iteration,
        loss=loss,
        learning_rate=rate,
        grad_norm=norm,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=parts.config.data.tokens_before(progress.consumed_samples),
        global_batch_size=batch_size,
        loss_scale=scale,
        skipped=progress.skipped - skipped_before,
        nan=progress.nan - nan_before,
        step_ms=seconds * 1e3,
        data_wait_ms=waited * 1e3,
        tokens_per_second=rates.tokens_per_second,
        samples_per_second=rates.samples_per_second,
        tflops_per_gpu=rates.tflops_per_gpu,
        mfu=rates.mfu,
    )


def forward_backward(parts: TrainingParts, batches: list[MicroBatch], links: Links) -> Tensor:
    """Gradients of the mean token loss over the global batch, times the loss scale.

    Returns:
        As ``sum_losses``.
    """
    num_tokens = 1.0
    if parts.is_last_stage:  # alone it knows the labels, and needs the count
        # Over gloo, so that no GPU is waited for before a step.
        mine = torch.tensor(_own_tokens(batches), dtype=torch.float64)
        num_tokens = max(1.0, all_reduce(mine, parts.groups.dp).item())
    pp, model = parts.groups.pp, parts.model
    # What is recorded adds to gradients, always.
    model.data_parallel.start(trains=True, replaces=not parts.graphs.is_on)
    losses = run_plan(
        stage_plan(pp.rank, pp.size, len(model.chunks), len(batches), trains=True),
        parts.graphs.forward_of(batches),
        links,
        grad_scale=parts.loss_scale.scale / num_tokens,
        before_backward=lambda chunk, last: model.data_parallel.before_backward(
            chunk, is_last=last
        ),
        after_backward=model.data_parallel.after_backward,
    )
    model.data_parallel.finish()
    sum_tied_gradients(model, parts.config, parts.groups)
    return sum_losses(parts, losses, batches)


def sum_losses(parts: TrainingParts, losses: list[Tensor], batches: Sequence[MicroBatch]) -> Tensor:
    """Sum of token losses in nats, and number of counted tokens, over micro batches and all ranks.

    The last stage, which alone has losses and labels, tells them to all stages.

    Returns:
        Both as float64 [2] on this rank's device, which the host has not waited for.
    """
    told = torch.zeros(2, dtype=torch.float64, device=parts.device)
    if losses:
        told[0] = torch.stack(losses).double().sum()
        told[1].fill_(_own_tokens(batches))
    for group in (parts.groups.dp, parts.groups.pp):
        told = all_reduce(told, group)
    return told


def _own_tokens(batches: Sequence[MicroBatch]) -> float:
    """Counted tokens of this rank's micro batches; right on the last stage."""
    return float(sum(batch.num_tokens for batch in batches))


def _update(parts: TrainingParts, sums: Tensor, scale: float) -> tuple[float, float, bool]:
    """Clips, and takes the step if its numbers are sound; drops the gradients.

    The GPU decides, so that it need not wait for the host: this one waits for the numbers when it
    has given the GPU all work of the step, and the GPU updates while it goes on to the next.

    Returns:
        The loss in nats per counted token, the norm of the gradient, and whether no token counts.
    """
    copies = parts.model.tied_copy_parameters()
    squared = squared_norm(parts.model.parameters.values(), parts.groups, copies=copies)
    numbers = torch.cat((sums, squared.view(1)))
    told = _start_telling(numbers)
    skips = ~numbers.isfinite().all() | (numbers[1] == 0)
    divisor = clipping_divisor(squared, parts.config.optimizer.clip_grad, scale)
    update(parts.optimizer, divisor, skips)
    parts.optimizer.zero_grad(set_to_none=True)
    total, num_tokens, squares = told()
    return total / max(1.0, num_tokens), math.sqrt(squares) / scale, num_tokens == 0


def _start_telling(numbers: Tensor) -> Callable[[], list[float]]:
    """What gives the numbers to the host, which waits for them and for nothing that follows."""
    if not numbers.is_cuda:
        return numbers.tolist
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    is_there = torch.cuda.Event()
    is_there.record()

    def wait() -> list[float]:
        is_there.synchronize()
        return copied.tolist()

    return wait


def _count(
    parts: TrainingParts, progress: Progress, loss: float, norm: float, *, is_empty: bool
) -> None:
    """Counts a step as good or as skipped, and ends a run that can only skip."""
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    # A finite loss whose gradients overflow is the loss scale's doing; a loss that is not finite
    # is the model's.
    overflowed = parts.loss_scale.update(not math.isfinite(norm)) and math.isfinite(loss)
    if is_finite and not is_empty:
        progress.nan_in_a_row = 0
    else:
        progress.skipped += 1
    if not is_finite and not overflowed and not is_empty:
        _count_bad_step(progress, loss, norm)
    if parts.loss_scale.stop_advice is not None:
        raise UserError(parts.loss_scale.stop_advice)


def _count_bad_step(progress: Progress, loss: float, norm: float) -> None:
    progress.nan += 1
    progress.nan_in_a_row += 1
    if progress.nan_in_a_row >= MAX_CONSECUTIVE_NAN:
        raise UserError(
            f"{progress.nan_in_a_row} steps in a row up to step {progress.iteration + 1} gave no "
            f"finite numbers (loss {loss}, gradient norm {norm}): the run has diverged. Lower "
            "optimizer.lr, lengthen the warm-up or set optimizer.clip_grad (which is another run, "
            "from step 0; the checkpoints of this one stay)"
        )
