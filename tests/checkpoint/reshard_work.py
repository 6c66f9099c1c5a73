"""What the ranks of the reshard tests do: train and save, load what any layout saved, train on.

With the real parts of a training run: its state directory saves in the background while training
goes on, and its resume decides what is loaded. Dropout is off but where a run goes on in the same
layout, since no two layouts share its masks.
"""

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lib.checkpoint.background import Saver
from lib.checkpoint.loading import find_latest
from lib.checkpoint.retention import Retention
from lib.checkpoint.state import optimizer_scalars, random_streams, training_tensors
from lib.config.launch_plan import layout_for
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.parallel.storage import local
from lib.train.comparison import whole_tensors
from lib.train.run_state import RunState
from lib.train.setup import TrainingParts, build_training
from lib.train.step import Progress, train_step
from tests.checkpoint.reshard_layouts import AFTER, BEFORE, Course, End, Saved
from tests.checkpoint.saved import save_tensors as save

_CPU = torch.device("cpu")
_KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def train_alone(config_text: str) -> End:
    """The truth: one rank that never stops, no checkpoint anywhere."""
    parts, progress = _build(config_text), Progress()
    for _ in range(BEFORE):
        train_step(parts, progress)
    return _finish(parts, progress)


def train_and_save(jobs: list[tuple[str, Saved]]) -> list[Course]:
    """For each run: trains and saves without dropout, then with it, and goes on."""
    courses = []
    for config_text, saved in jobs:
        parts, progress = _build(config_text), Progress()
        for _ in range(BEFORE):
            train_step(parts, progress)
        plain = _begin_saving(parts, progress, saved.plain)
        parts.model.chunks.train()
        train_step(parts, progress)  # so that the streams are no longer those of the seed
        plain.finish()
        dropout = _begin_saving(parts, progress, saved.dropout)
        courses.append(_course(parts, progress))
        dropout.finish()
        parts.close()
    return courses


def resume_all(
    jobs: list[tuple[str, Saved | None, dict[str, Path], Path]],
) -> list[tuple[Course | None, dict[str, End] | None]]:
    """For each run: goes on from checkpoints of several layouts, and saves each again at once.

    Args:
        jobs: run; the checkpoints of the same layout, if it is to go on with dropout first;
            state directories by layout; and where to save those again, numbered.

    Returns:
        For each run its course with dropout, and on rank 0 the ends by layout.
    """
    found = []
    for config_text, own, sources, again in jobs:
        parts, course, ends = _build(config_text), None, {}
        run = _run_of(parts)
        if own is not None:
            run.path = own.dropout
            progress = run.resume(find_latest(run.path, parts.config.training.train_iters))
            parts.model.chunks.train()
            course = _course(parts, progress)
            parts.model.chunks.eval()
        for number, (name, directory) in enumerate(sources.items()):
            run.path = directory
            progress = run.resume(find_latest(run.path, parts.config.training.train_iters))
            tensors = training_tensors(parts.model.own_parameters().items(), parts.optimizer)
            save(again / str(number), BEFORE, tensors, optimizer_scalars(parts.optimizer), 1)
            ends[name] = _finish(parts, progress)
        parts.close()
        found.append((course, ends if dist.get_rank() == 0 else None))
    return found


def _build(config_text: str) -> TrainingParts:
    """The real parts; in evaluation mode, so that dropout is off until it is wanted."""
    config = RunConfig.model_validate_json(config_text)
    layout = layout_for(config, dist.get_world_size())
    parts = build_training(config, RuntimeConfig(), _CPU, layout)
    parts.model.chunks.eval()
    return parts


def _run_of(parts: TrainingParts) -> RunState:
    """A run without history and results, as it is on every rank but the first."""
    layout = layout_for(parts.config, dist.get_world_size())
    return RunState(parts, layout, state=None, results=Path(), provenance=None)


def _begin_saving(parts: TrainingParts, progress: Progress, directory: Path) -> Saver:
    """Saves in the background, while the steps that follow change every tensor."""
    run = _run_of(parts)
    run.saver = Saver(directory, Retention(1), background=True)
    run.save(progress)
    return run.saver


def _finish(parts: TrainingParts, progress: Progress) -> End:
    rows = [train_step(parts, progress) for _ in range(AFTER)]
    own = training_tensors(parts.model.own_parameters().items(), parts.optimizer)
    whole: dict[str, Tensor] = {}
    for kind in _KINDS:
        mine = {name.removeprefix(kind): t for name, t in own.items() if name.startswith(kind)}
        # By hand, not by DTensor: a wrong idea of the pieces would otherwise be on both sides.
        whole |= {kind + name: value for name, value in whole_tensors(parts, mine).items()}
    return End([row.loss for row in rows], [row.grad_norm for row in rows], whole)


def _course(parts: TrainingParts, progress: Progress) -> Course:
    groups = parts.groups
    streams = random_streams(dist.get_rank(), _CPU, groups.shard_stream)
    digests = {name.rpartition(".")[2]: _digest({"": value}) for name, value in streams.items()}
    rows = [train_step(parts, progress) for _ in range(2)]
    held = training_tensors(parts.model.parameters.items(), parts.optimizer)
    held |= random_streams(dist.get_rank(), _CPU, groups.shard_stream)
    return Course(
        (groups.pp.rank, groups.dp.rank, groups.tp.rank),
        digests,
        [figure for row in rows for figure in (row.loss, row.grad_norm)],
        _digest(held),
    )


def _digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(name.encode())
        found.update(local(value.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()
