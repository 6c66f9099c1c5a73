"""One worker's whole life: open the state, build, resume, train, publish.

Everything that can refuse the run (the lock, changed code, damaged checkpoints, missing tokens)
comes before the first step, and as much as possible before a GPU is taken.
"""

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.checkpoint.directory import iterations
from lib.checkpoint.fingerprint import code_hash
from lib.checkpoint.history import History
from lib.checkpoint.lock import lock
from lib.checkpoint.published import publish_model
from lib.checkpoint.ranks import on_rank_zero
from lib.checkpoint.resume import ResumePolicy, StateDirectory, open_state, state_path
from lib.checkpoint.shapes import parameter_shapes
from lib.checkpoint.state import (
    optimizer_scalars,
    random_streams,
    restore,
    restore_random_streams,
    training_tensors,
)
from lib.checkpoint.storage import bytes_needed, find_latest, load_tensors, require_space, save
from lib.config.launch_plan import layout_for
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.run_config import RunConfig
from lib.console import copy_to, say
from lib.errors import UserError
from lib.optim.optimizer import decay_table
from lib.train.loop import Hooks, Progress, train
from lib.train.metrics import ResultFiles, StepRow
from lib.train.run_record import run_record
from lib.train.setup import TrainingParts, build_training, set_determinism, start_process_group
from lib.train.signals import StopFlag
from lib.train.worker import Stopped, worker_device

LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class PretrainInputs:
    """What a run reads and where it writes.

    Attributes:
        params: the parameter file, for the record.
        run_config: ``outputs/run_config.json``.
        launch: section ``launch``.
        runtime: section ``runtime``.
        code: files and folders of the training code; a change of theirs is a change of the run.
        tokenizer: folder of the tokenizer, published with the model.
        state_root: folder of the state directories.
        model: folder to publish the finished model in.
        results: folder of metrics and plots.
    """

    params: Path
    run_config: Path
    launch: LaunchConfig
    runtime: RuntimeConfig
    code: tuple[Path, ...]
    tokenizer: Path
    state_root: Path
    model: Path
    results: Path


def pretrain(inputs: PretrainInputs, stop: StopFlag) -> None:
    """Trains one configuration to its end and publishes the model.

    Raises:
        UserError: something about the run has to be mended by the user.
        Stopped: a stop was asked for and the state is saved.
    """
    config = RunConfig.load(inputs.run_config)
    code_at_start = code_hash(inputs.code)
    is_first = int(os.environ["RANK"]) == 0
    with ExitStack() as stack:
        state: StateDirectory | None = None
        if is_first:
            state = _open(inputs, config, code_at_start, stack)
        device = start_process_group(worker_device())
        stack.callback(dist.destroy_process_group)
        set_determinism(inputs.runtime)
        layout = layout_for(config, dist.get_world_size())
        parts = build_training(config, inputs.runtime, device, layout)
        stack.callback(parts.batches.close)
        run = _Run(inputs, parts, state)
        progress = run.resume()
        train_iters = config.training.train_iters
        if progress.iteration < train_iters:
            run.mark_training(dict(asdict(layout)))
            if not train(parts, progress, run.hooks(stop)):
                raise Stopped(f"iteration {progress.iteration} of {train_iters} is saved")
        _require_unchanged(inputs, config, code_at_start)
        run.publish(progress)


def _open(inputs: PretrainInputs, config: RunConfig, code: str, stack: ExitStack) -> StateDirectory:
    """Locks and opens the state directory; on rank 0, before torch takes a device."""
    path = state_path(inputs.state_root, config)
    stack.enter_context(lock(path, LOCK_WAIT_S))
    policy = ResumePolicy(inputs.launch.on_code_change, inputs.launch.fresh)
    state = open_state(inputs.state_root, config, code, policy)
    stack.enter_context(copy_to(state.path / "train.log"))
    return state


def _require_unchanged(inputs: PretrainInputs, config: RunConfig, code: str) -> None:
    """Refuses to publish a model under parameters or code that it was not trained with.

    DVC records the files as they are after the run, not as they were when it began.
    """
    changed = []
    if RunConfig.load(inputs.run_config) != config:
        changed.append(str(inputs.run_config))
    if code_hash(inputs.code) != code:
        changed.append("the training code")
    if changed:
        raise UserError(
            f"{' and '.join(changed)} changed while the run was training, so the model would be "
            "recorded under the wrong inputs; its checkpoints are kept: put the files back (git "
            "checkout) and run again to publish it"
        )


class _Run:
    """A run's state directory, history and results, on every rank; rank 0 writes."""

    def __init__(
        self, inputs: PretrainInputs, parts: TrainingParts, state: StateDirectory | None
    ) -> None:
        self.inputs = inputs
        self.parts = parts
        self.config = parts.config
        self.state = state
        self.path = Path(on_rank_zero(lambda: str(state.path if state else "")))
        self.history = History(self.path)
        self.files: ResultFiles | None = None

    def resume(self) -> Progress:
        """Loads the newest checkpoint within the length of this run, if there is one."""
        parts, train_iters = self.parts, self.config.training.train_iters
        progress = Progress()
        tensors = training_tensors(parts.parameters.items(), parts.optimizer)
        found = find_latest(self.path, train_iters)
        if found is None:
            for line in decay_table(parts.parameters.items()):
                self._say(f"weight decay: {line}")
            self._say(f"starting at iteration 0 of {train_iters} in {self.path}")
        else:
            progress = Progress.from_saved(found.scalars["progress"])
            same_grid = found.scalars["random_streams"] == self._stream_kind()
            streams = random_streams(dist.get_rank()) if same_grid else {}
            load_tensors(found, tensors | streams)
            restore(parts.optimizer, found.scalars)
            if same_grid:
                restore_random_streams(streams, dist.get_rank())
            self._say(f"continuing from iteration {found.iteration} of {train_iters}: {found.path}")
        on_rank_zero(lambda: require_space(self.path, bytes_needed(tensors)))
        if self.state is not None:
            self._restart_results(progress.iteration)
        return progress

    def _stream_kind(self) -> list[object]:
        """On what the random streams of a checkpoint can be continued: the same ranks."""
        return [dist.get_world_size(), self.parts.device.type]

    def _restart_results(self, iteration: int) -> None:
        """Cuts the history at the checkpoint and writes the result files anew from it."""
        # A run made shorter keeps the rows that its later checkpoints belong to.
        self.history.truncate(max([iteration, *iterations(self.path)]))
        self.files = ResultFiles(
            self.inputs.results,
            self.history.rows("train", iteration),
            self.history.rows("valid", iteration),
        )

    def mark_training(self, layout: dict[str, object]) -> None:
        """Records that steps are about to be taken."""
        if self.state is not None:
            self.state.mark_training(layout)

    def hooks(self, stop: StopFlag) -> Hooks:
        """What the loop calls."""
        return Hooks(self.on_step, self.on_validation, self.save, lambda: _any_rank(stop))

    def on_step(self, row: StepRow) -> None:
        """Records a step; refreshes the live figures with every log line."""
        if self.files is None:
            return
        values = row.as_row()
        self.history.append({"kind": "train", "iteration": row.step, **values})
        self.files.add_step(values)
        if row.step % self.parts.runtime.log_interval == 0:
            self.files.write_live(values, self.config.training.train_iters)

    def on_validation(self, row: dict[str, object]) -> None:
        """Records a validation."""
        if self.files is not None:
            self.history.append({"kind": "valid", "iteration": row["step"], **row})
            self.files.add_validation(row)

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint of the state after ``progress.iteration`` steps."""
        parts, checkpoint = self.parts, self.config.checkpoint
        if self.state is not None:
            self.history.sync()
        tensors = training_tensors(parts.parameters.items(), parts.optimizer)
        scalars = {
            "progress": asdict(progress),
            "random_streams": self._stream_kind(),
            **optimizer_scalars(parts.optimizer),
        }
        path = save(
            self.path,
            progress.iteration,
            tensors | random_streams(dist.get_rank()),
            scalars,
            checkpoint.keep_last,
            checkpoint.keep_every,
        )
        self._say(f"saved iteration {progress.iteration} to {path}")

    def publish(self, progress: Progress) -> None:
        """Writes ``model/`` and the final figures, and marks the state as finished."""
        tensors = whole_parameters(self.parts)
        if self.state is None or self.files is None:
            return
        last = self.history.rows("train", progress.iteration)[-1:]
        for row in last:
            self.files.write_live(row, self.config.training.train_iters)
        record = run_record(self.inputs.params, self.config, self.state.record)
        publish_model(
            self.inputs.model,
            tensors,
            self.config,
            self.inputs.tokenizer,
            record,
            self.path / "train.log",
        )
        self.state.mark_finished()
        say(f"published the model of iteration {progress.iteration} in {self.inputs.model}")

    def _say(self, text: str) -> None:
        if self.state is not None:
            say(text)


def _any_rank(stop: StopFlag) -> bool:
    """Whether any rank was asked to stop; agreed over gloo, so that no GPU waits."""
    flag = torch.tensor(int(stop.requested))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def whole_parameters(parts: TrainingParts) -> dict[str, Tensor]:
    """Every parameter whole, fp32 on the CPU, without padding rows; all ranks must call."""
    shapes = parameter_shapes(parts.config.model, parts.config.data.vocab_size)
    whole = {}
    for name, parameter in parts.parameters.items():
        stored = parameter.detach()
        full = stored.full_tensor() if isinstance(stored, DTensor) else stored
        whole[name] = full[: shapes[name][0]].cpu()
    return whole
