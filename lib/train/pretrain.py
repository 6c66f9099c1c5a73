"""One worker's whole life: open the state, build, resume, train, publish.

Everything that can refuse the run (the lock, changed code, damaged checkpoints, missing tokens)
comes before the first step, and as much as possible before a GPU is taken.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lib.checkpoint.directory import iteration_path, iterations
from lib.checkpoint.fingerprint import code_hash
from lib.checkpoint.history import History
from lib.checkpoint.lock import lock
from lib.checkpoint.published import publish_model
from lib.checkpoint.ranks import gather, on_rank_zero
from lib.checkpoint.resume import ResumePolicy, StateDirectory, open_state, state_path
from lib.checkpoint.shapes import parameter_shapes
from lib.checkpoint.state import (
    optimizer_scalars,
    random_streams,
    restore,
    restore_random_streams,
    training_tensors,
)
from lib.checkpoint.storage import (
    LoadedCheckpoint,
    bytes_needed,
    find_latest,
    load_tensors,
    read_model,
    require_space,
    save,
)
from lib.config.launch_plan import Layout, layout_for
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.run_config import RunConfig
from lib.console import bar_on_terminal, copy_to, say, warn
from lib.data.tokens_manifest import TokensManifest
from lib.errors import UserError
from lib.model.flops import MFU_CONVENTION
from lib.optim.optimizer import decay_table, decays
from lib.parallel.collectives import all_reduce
from lib.parallel.groups import Group
from lib.train.loop import Hooks, train
from lib.train.metrics import ResultFiles, StepRow
from lib.train.run_record import begin_record, finish_record
from lib.train.setup import TrainingParts, build_training, set_determinism, start_process_group
from lib.train.signals import StopFlag
from lib.train.step import Progress
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
    _require_its_tokens(config)
    code_at_start = code_hash(inputs.code)
    is_first = int(os.environ["RANK"]) == 0
    record = begin_record(inputs.params, config) if is_first else {}
    with ExitStack() as stack:
        state: StateDirectory | None = None
        if is_first:
            state = _open(inputs, config, code_at_start, stack)
        device = start_process_group(worker_device())
        stack.callback(dist.destroy_process_group)
        set_determinism(inputs.runtime)
        layout = layout_for(config, dist.get_world_size())
        parts = build_training(config, inputs.runtime, device, layout, inputs.launch.debug)
        stack.callback(parts.batches.close)
        run = _Run(inputs, parts, layout, state)
        progress = run.resume()
        train_iters = config.training.train_iters
        if progress.iteration < train_iters:
            run.mark_training(dict(asdict(layout)))
            if is_first and parts.throughput.peak_tflops is not None:
                say(f"MFU in the lines below: {MFU_CONVENTION}")
            if is_first:
                run.show_bar(stack, progress.iteration)
            if not train(parts, progress, run.hooks(stop)):
                raise Stopped(_what_is_saved(progress.iteration, train_iters))
        _require_unchanged(inputs, config, code_at_start)
        run.publish(progress, record)


def _open(inputs: PretrainInputs, config: RunConfig, code: str, stack: ExitStack) -> StateDirectory:
    """Locks and opens the state directory; on rank 0, before torch takes a device."""
    path = state_path(inputs.state_root, config)
    stack.enter_context(lock(path, LOCK_WAIT_S))
    policy = ResumePolicy(inputs.launch.on_code_change, inputs.launch.fresh)
    state = open_state(inputs.state_root, config, code, policy)
    stack.enter_context(copy_to(state.path / "train.log"))
    return state


def _require_its_tokens(config: RunConfig) -> None:
    """Refuses tokens other than those the configuration was made for."""
    folder, data = Path(config.data.prefix).parent, config.data
    found = TokensManifest.load(folder).differences(
        bin_sha256=data.tokens_sha256,
        tokenizer_fingerprint=data.tokenizer_fingerprint,
        vocab_size=data.vocab_size,
    )
    if found:
        raise UserError(
            f"{folder}: not the tokens of the run configuration: {'; '.join(found)}; run: dvc "
            "repro validate_config"
        )


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


def _what_is_saved(iteration: int, train_iters: int) -> str:
    if iteration == 0:
        return "nothing was trained yet"
    return f"iteration {iteration} of {train_iters} is saved"


class _Run:
    """A run's state directory, history and results, on every rank; rank 0 writes."""

    def __init__(
        self,
        inputs: PretrainInputs,
        parts: TrainingParts,
        layout: Layout,
        state: StateDirectory | None,
    ) -> None:
        self.inputs = inputs
        self.parts = parts
        self.layout = layout
        self.config = parts.config
        self.state = state
        self.path = Path(on_rank_zero(lambda: str(state.path if state else "")))
        self.history = History(self.path)
        self.files: ResultFiles | None = None
        self.advance: Callable[[int], None] = lambda _steps: None

    def resume(self) -> Progress:
        """Loads the newest checkpoint within the length of this run, if there is one."""
        parts, train_iters = self.parts, self.config.training.train_iters
        progress = Progress()
        tensors = training_tensors(parts.model.parameters.items(), parts.optimizer)
        found = find_latest(self.path, train_iters)
        if found is None:
            mine = parts.model.own_parameters().items()
            table = gather([(name, tuple(p.shape), decays(p)) for name, p in mine])
            for line in decay_table(dict.fromkeys(row for rows in table for row in rows)):
                self._say(f"weight decay: {line}")
            self._say(f"starting at iteration 0 of {train_iters} in {self.path}")
        else:
            self._load(found, tensors)
            progress = Progress.from_saved(found.scalars["progress"])
            self._say_where(found)
        if progress.iteration < train_iters:
            needed = bytes_needed(tensors)
            on_rank_zero(lambda: require_space(self.path, needed))
        if self.state is not None:
            self._restart_results(progress.iteration)
        return progress

    def _load(self, found: LoadedCheckpoint, tensors: dict[str, Tensor]) -> None:
        rank, device = dist.get_rank(), self.parts.device
        shard_stream = self.parts.groups.shard_stream
        same_grid = found.scalars["random_streams"] == self._stream_kind()
        streams = random_streams(rank, device, shard_stream) if same_grid else {}
        load_tensors(found, tensors | streams)
        restore(self.parts.optimizer, found.scalars)
        loss_scale = found.scalars["loss_scale"]
        assert isinstance(loss_scale, dict)
        self.parts.loss_scale.restore(loss_scale)
        if same_grid:
            restore_random_streams(streams, rank, device, shard_stream)
        changed = _differences(found.scalars["arithmetic"], self._arithmetic())
        if changed and self.state is not None:
            warn(f"not bit for bit the run that was interrupted: {'; '.join(changed)}")

    def _say_where(self, found: LoadedCheckpoint) -> None:
        train_iters = self.config.training.train_iters
        if found.iteration < train_iters:
            self._say(f"continuing from iteration {found.iteration} of {train_iters}: {found.path}")
        elif self.state is not None:
            say(
                f"nothing is left to train: all {train_iters} iterations were done (layout "
                f"{self.state.record.layout}); publishing the model of {found.path}"
            )

    def _stream_kind(self) -> list[object]:
        """On what the random streams of a checkpoint can be continued: the same ranks."""
        groups = self.parts.groups
        return [groups.pp.size, groups.dp.size, groups.tp.size, self.parts.device.type]

    def _arithmetic(self) -> dict[str, object]:
        """What changes the last digits of a step, though not what is trained."""
        runtime, training = self.parts.runtime, self.config.training
        return {
            "device": self.parts.device.type,
            "parallel": dict(asdict(self.layout)),
            "parallel.sequence": self.config.parallel.sequence,
            "training.micro_batch_size": training.micro_batch_size,
            "launch.threads": torch.get_num_threads(),
            "runtime.attention": runtime.attention,
            "runtime.deterministic": runtime.deterministic,
            "torch": torch.__version__,
        }

    def _restart_results(self, iteration: int) -> None:
        """Cuts the history at the checkpoint and writes the result files anew from it."""
        # A run made shorter keeps the rows that its later checkpoints belong to.
        self.history.truncate(max([iteration, *iterations(self.path)]))
        self.files = ResultFiles(
            self.inputs.results,
            self.history.rows("train", iteration),
            self.history.rows("valid", iteration),
            self.history.rows("gradients", iteration),
        )

    def mark_training(self, layout: dict[str, object]) -> None:
        """Records that steps are about to be taken."""
        if self.state is not None:
            self.state.mark_training(layout)

    def show_bar(self, stack: ExitStack, iteration: int) -> None:
        """Shows progress below the log lines, where there is a terminal."""
        bar = bar_on_terminal("training", self.config.training.train_iters, "steps")
        self.advance = stack.enter_context(bar)
        self.advance(iteration)

    def hooks(self, stop: StopFlag) -> Hooks:
        """What the loop calls."""
        return Hooks(
            on_step=self.on_step,
            on_validation=self.on_validation,
            on_gradients=self.on_gradients,
            save=self.save,
            stop_requested=lambda: _any_rank(stop, self.parts.groups.world),
        )

    def on_step(self, row: StepRow) -> None:
        """Records a step; refreshes the live figures with every log line."""
        if self.files is None:
            return
        self.advance(1)
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

    def on_gradients(self, rows: list[dict[str, object]]) -> None:
        """Adds the statistics of a step's gradients to their file."""
        if self.files is not None:
            row: dict[str, object] = {"kind": "gradients", "parameters": rows}
            self.history.append(row | {"iteration": rows[0]["step"]})
            self.files.add_gradients(rows)

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint of the state after ``progress.iteration`` steps."""
        parts, checkpoint = self.parts, self.config.checkpoint
        if self.state is not None:
            self.history.sync()
        tensors = training_tensors(parts.model.own_parameters().items(), parts.optimizer)
        scalars = {
            "progress": asdict(progress),
            "random_streams": self._stream_kind(),
            "arithmetic": self._arithmetic(),
            "loss_scale": parts.loss_scale.state(),
            **optimizer_scalars(parts.optimizer),
        }
        path = save(
            self.path,
            progress.iteration,
            tensors | random_streams(dist.get_rank(), parts.device, parts.groups.shard_stream),
            scalars,
            checkpoint.keep_last,
            checkpoint.keep_every,
        )
        self._say(f"saved iteration {progress.iteration} to {path}")

    def publish(self, progress: Progress, record: dict[str, object]) -> None:
        """Writes ``model/`` and the final figures, and marks the state as finished."""
        if self.state is None or self.files is None:
            return
        last = self.history.rows("train", progress.iteration)[-1:]
        for row in last:
            self.files.write_live(row, self.config.training.train_iters)
        publish_model(
            self.inputs.model,
            published_parameters(iteration_path(self.path, progress.iteration), self.config),
            self.config,
            self.inputs.tokenizer,
            finish_record(record, self.state.record),
            self.path / "train.log",
        )
        self.state.mark_finished()
        say(f"published the model of iteration {progress.iteration} in {self.inputs.model}")

    def _say(self, text: str) -> None:
        if self.state is not None:
            say(text)


def _differences(saved: object, now: dict[str, object]) -> list[str]:
    """Where two descriptions of a run's arithmetic differ."""
    assert isinstance(saved, dict)
    return [
        f"{name} was {saved[name]}, is {value}"
        for name, value in now.items()
        if saved.get(name) != value
    ]


def _any_rank(stop: StopFlag, world: Group) -> bool:
    """Whether any rank was asked to stop; agreed over gloo, so that no GPU waits."""
    flag = torch.tensor(int(stop.requested))
    return bool(all_reduce(flag, world, dist.ReduceOp.MAX))


def published_parameters(checkpoint: Path, config: RunConfig) -> dict[str, Tensor]:
    """Every parameter whole, fp32 on the CPU, without padding rows; from a checkpoint's files.

    So what is published is what was saved, in any layout, and no rank sends anything.
    """
    stored = parameter_shapes(config.model, config.derived.padded_vocab_size)
    wanted = parameter_shapes(config.model, config.data.vocab_size)
    whole = read_model(checkpoint, stored)
    return {name: value[: wanted[name][0]].float() for name, value in whole.items()}
