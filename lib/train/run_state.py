"""The state of one run on disk: its checkpoints, its history, and the results written from it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lib.checkpoint.background import Saver
from lib.checkpoint.directory import iterations
from lib.checkpoint.history import History
from lib.checkpoint.loading import LoadedCheckpoint, find_latest, load_tensors
from lib.checkpoint.ranks import gather, on_rank_zero
from lib.checkpoint.resume import StateDirectory
from lib.checkpoint.retention import Retention
from lib.checkpoint.saving import bytes_needed, require_space
from lib.checkpoint.state import (
    attention_of,
    optimizer_scalars,
    random_streams,
    restore,
    restore_random_streams,
    training_tensors,
)
from lib.config.launch_plan import Layout
from lib.config.run_config import RunConfig
from lib.console import bar_on_terminal, say, warn
from lib.layers.attention import backend_name
from lib.optim.optimizer import decay_table, decays
from lib.parallel.collectives import all_reduce
from lib.train.initial import start_from_weights
from lib.train.loop import Hooks
from lib.train.metrics import ResultFiles, StepRow
from lib.train.setup import TrainingParts
from lib.train.signals import StopFlag
from lib.train.step import Progress

# What a rank has to tell the others after each step; the largest is heard.
_GO_ON, _STOP, _SAVE_FAILED = 0, 1, 2


@dataclass(frozen=True)
class Provenance:
    """What a checkpoint says about where it comes from; known on rank 0, which writes it.

    Attributes:
        versions: of Python and of each package, by name.
        git_commit: of the project; None outside git.
    """

    versions: dict[str, str]
    git_commit: str | None

    @classmethod
    def of(cls, record: dict[str, object]) -> "Provenance":
        """Taken from a run's record (``lib.train.run_record``)."""
        packages, git = record["packages"], record["git"]
        assert isinstance(packages, dict)
        commit = git["commit"] if isinstance(git, dict) else None
        return cls({"python": str(record["python"])} | packages, commit)


def checkpoint_to_resume(
    state: StateDirectory | None, config: RunConfig
) -> LoadedCheckpoint | None:
    """The newest whole checkpoint within the length of a run, if there is one.

    Args:
        state: the opened directory, on rank 0; None on the others.
        config: of the run.
    """
    return find_latest(_path_of(state), config.training.train_iters)


def _path_of(state: StateDirectory | None) -> Path:
    """The folder of the state that rank 0 has opened, on every rank."""
    return Path(on_rank_zero(lambda: str(state.path if state else "")))


class RunState:
    """A run's state directory, history and results, on every rank; rank 0 writes.

    Attributes:
        config: the run configuration.
        state: the opened state directory; None but on rank 0.
        path: its folder.
        history: its rows.
        files: the result files; None but on rank 0.
        saver: of its checkpoints.
    """

    def __init__(
        self,
        parts: TrainingParts,
        layout: Layout,
        state: StateDirectory | None,
        results: Path,
        provenance: Provenance | None,
    ) -> None:
        """Joins the other ranks.

        Args:
            parts: from ``lib.train.setup.build_training``.
            layout: how the processes share the work.
            state: the opened directory, on rank 0; None on the others.
            results: folder of metrics and plots.
            provenance: for the checkpoints, on rank 0; None on the others.
        """
        self._parts, self._layout, self._provenance = parts, layout, provenance
        self.config = parts.config
        self.state, self._results = state, results
        self.path = _path_of(state)
        self.history = History(self.path)
        self.files: ResultFiles | None = None
        rule = self.config.checkpoint
        self._retention = Retention(rule.keep_last, rule.keep_every)
        background = parts.runtime.background_save
        self.saver = Saver(self.path, self._retention, background=background)
        self._advance: Callable[[int], None] = lambda _steps: None
        self._rows = 0
        self._is_stopping = False

    def resume(self, found: LoadedCheckpoint | None) -> Progress:
        """Loads what ``checkpoint_to_resume`` has found, or begins."""
        parts, train_iters = self._parts, self.config.training.train_iters
        progress = Progress()
        tensors = training_tensors(parts.model.parameters.items(), parts.optimizer)
        if found is None:
            self._begin()
        else:
            self._load(found, tensors)
            progress = Progress.from_saved(found.scalars["progress"])
            self._say_where(found)
        if progress.iteration < train_iters:
            needed = bytes_needed(tensors)
            on_rank_zero(lambda: require_space(self.path, needed))
        if self.state is not None:
            self._restart_results(progress.iteration)
            if found is not None:
                self._compare_with_history(found, progress)
                self._compare_draws(found, progress)
        return progress

    def mark_training(self) -> None:
        """Records that steps are about to be taken."""
        if self.state is not None:
            self.state.mark_training(dict(asdict(self._layout)))

    def show_bar(self, stack: ExitStack, iteration: int) -> None:
        """Rank 0: shows progress below the log lines, where there is a terminal."""
        bar = bar_on_terminal("training", self.config.training.train_iters, "steps")
        self._advance = stack.enter_context(bar)
        self._advance(iteration)

    def hooks(self, stop: StopFlag) -> Hooks:
        """What the loop calls."""
        return Hooks(
            on_step=self.on_step,
            on_validation=self.on_validation,
            on_gradients=self.on_gradients,
            save=self.save,
            stop_requested=lambda: self._stop_requested(stop),
        )

    def on_step(self, row: StepRow) -> None:
        """Records a step; refreshes the live figures with every log line."""
        if self.files is None:
            return
        self._advance(1)
        values = row.as_row()
        self._append({"kind": "train", "iteration": row.step, **values})
        self.files.add_step(values)
        if row.step % self._parts.runtime.log_interval == 0:
            self.files.write_live(values, self.config.training.train_iters)

    def on_validation(self, row: dict[str, object]) -> None:
        """Records a validation."""
        if self.files is not None:
            self._append({"kind": "valid", "iteration": row["step"], **row})
            self.files.add_validation(row)

    def on_gradients(self, rows: list[dict[str, object]]) -> None:
        """Adds the statistics of a step's gradients to their file."""
        if self.files is not None:
            self._append({"kind": "gradients", "iteration": rows[0]["step"], "parameters": rows})
            self.files.add_gradients(rows)

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint of the state after ``progress.iteration`` steps.

        Nothing is trained after the last save of a run and the save at a stop, so those are waited
        for.
        """
        parts = self._parts
        if self.state is not None:
            self.history.sync()
        tensors = training_tensors(parts.model.own_parameters().items(), parts.optimizer)
        tensors |= random_streams(dist.get_rank(), parts.device, parts.groups.shard_stream)
        is_last = progress.iteration == self.config.training.train_iters
        save = self.saver.save if is_last or self._is_stopping else self.saver.start
        save(progress.iteration, tensors, self._scalars(progress))

    def _scalars(self, progress: Progress) -> dict[str, object]:
        """What ``lib.checkpoint.state`` lists, but where it comes from only on rank 0."""
        scalars: dict[str, object] = {
            "progress": asdict(progress),
            "data": self._data(progress),
            "tokens_seen": self.config.data.tokens_before(progress.consumed_samples),
            "metrics": {"rows": self._rows},
            "random_streams": self._stream_kind(),
            "loss_scale": self._parts.loss_scale.state(),
            "arithmetic": self._arithmetic(progress.consumed_samples),
            "run_config": self.config.model_dump(mode="json"),
        }
        scalars |= optimizer_scalars(self._parts.optimizer)
        return scalars | (asdict(self._provenance) if self._provenance else {})

    def _begin(self) -> None:
        """Says what is trained from step 0, and from which weights."""
        mine = self._parts.model.own_parameters().items()
        table = gather([(name, tuple(p.shape), decays(p)) for name, p in mine])
        for line in decay_table(dict.fromkeys(row for rows in table for row in rows)):
            self._say(f"weight decay: {line}")
        train_iters = self.config.training.train_iters
        later = iterations(self.path) if self.state is not None else []
        if later:  # find_latest found none within the length of the run
            warn(f"the checkpoints that are kept, of {later}, are beyond iteration {train_iters}")
        self._say(f"starting at iteration 0 of {train_iters} in {self.path}")
        for line in start_from_weights(self._parts.model, self.config):
            self._say(line)

    def _load(self, found: LoadedCheckpoint, tensors: dict[str, Tensor]) -> None:
        rank, device = dist.get_rank(), self._parts.device
        shard_stream = self._parts.groups.shard_stream
        same_grid = found.scalars["random_streams"] == self._stream_kind()
        streams = random_streams(rank, device, shard_stream) if same_grid else {}
        load_tensors(found, tensors | streams)
        self._retention.trust(found.iteration)
        restore(self._parts.optimizer, found.scalars)
        loss_scale = found.scalars["loss_scale"]
        assert isinstance(loss_scale, dict)
        self._parts.loss_scale.restore(loss_scale)
        if same_grid:
            restore_random_streams(streams, rank, device, shard_stream)
        data = found.scalars["data"]
        assert isinstance(data, dict)
        now = self._arithmetic(data["consumed_samples"])
        saved = found.scalars["arithmetic"]
        assert isinstance(saved, dict)
        changed = _differences(saved | {"runtime.attention": attention_of(saved)}, now)
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
        groups = self._parts.groups
        return [groups.pp.size, groups.dp.size, groups.tp.size, self._parts.device.type]

    def _arithmetic(self, consumed_samples: int) -> dict[str, object]:
        """What changes the last digits of the last step, though not what is trained."""
        runtime, phase = self._parts.runtime, self.config.phase_at(max(0, consumed_samples - 1))
        return {
            "device": self._parts.device.type,
            "parallel": dict(asdict(self._layout)),
            "parallel.sequence": self.config.parallel.sequence,
            "training.micro_batch_size": phase.micro_batch_size,
            "launch.threads": torch.get_num_threads(),
            "runtime.attention": backend_name(runtime.attention),
            "runtime.kernels": runtime.kernels,
            "runtime.deterministic": runtime.deterministic,
            "torch": torch.__version__,
        }

    def _data(self, progress: Progress) -> dict[str, object]:
        """Where the run stands in its data; all of it follows from the first number."""
        consumed = progress.consumed_samples
        return {
            "consumed_samples": consumed,
            "segment": self._parts.order.segment_at(consumed),
            "draws": self._draws(consumed),
        }

    def _draws(self, consumed_samples: int) -> dict[str, int]:
        order = self._parts.order
        return dict(zip(order.names, order.draws_before(consumed_samples), strict=True))

    def _compare_draws(self, found: LoadedCheckpoint, progress: Progress) -> None:
        """Warns where this code reads the corpora in another order than the saved run did."""
        data = found.scalars["data"]
        assert isinstance(data, dict)
        now = self._draws(progress.consumed_samples)
        saved = {name: count for name, count in data.get("draws", now).items() if count}
        if saved != {name: count for name, count in now.items() if count}:
            warn(
                f"{found.path}: its run had drawn {saved} samples of the corpora, and by this code "
                f"it would have been {now}: some samples will be read again and others left out"
            )

    def _restart_results(self, iteration: int) -> None:
        """Cuts the history at the checkpoint and writes the result files anew from it."""
        # A run made shorter keeps the rows that its later checkpoints belong to.
        self.history.truncate(max([iteration, *iterations(self.path)]))
        kinds = [self.history.rows(kind, iteration) for kind in ("train", "valid", "gradients")]
        sets = [each.name for each in self._parts.validation]
        named = sets if len(sets) > 1 else ()
        self.files = ResultFiles(self._results, *kinds, validation_sets=named)
        self._rows = sum(map(len, kinds))

    def _compare_with_history(self, found: LoadedCheckpoint, progress: Progress) -> None:
        """Says where a checkpoint and the history beside it do not tell the same story."""
        if "tokens_seen" not in found.scalars:  # saved before checkpoints said so much
            return
        steps = self.history.rows("train", progress.iteration)
        recorded = steps[-1] if steps else {}
        metrics = found.scalars["metrics"]
        assert isinstance(metrics, dict)
        told = {
            "last step": (progress.iteration, recorded.get("step")),
            "consumed samples": (progress.consumed_samples, recorded.get("consumed_samples")),
            "tokens seen": (found.scalars["tokens_seen"], recorded.get("consumed_tokens")),
            "rows": (metrics["rows"], self._rows),
        }
        if wrong := [f"{name} {a} and {b}" for name, (a, b) in told.items() if a != b]:
            warn(
                f"{found.path} and {self.history.path} differ: {'; '.join(wrong)}. Training goes "
                "on from the checkpoint; results/train.csv shows what the history has"
            )

    def _append(self, row: dict[str, object]) -> None:
        self.history.append(row)
        self._rows += 1

    def _stop_requested(self, stop: StopFlag) -> bool:
        """Whether any rank was asked to stop; agreed over gloo, so that no GPU waits.

        Raises:
            UserError: on all ranks, when a save in the background has failed on any.
        """
        mine = _SAVE_FAILED if self.saver.failed else _STOP if stop.requested else _GO_ON
        news = int(all_reduce(torch.tensor(mine), self._parts.groups.world, dist.ReduceOp.MAX))
        if news == _SAVE_FAILED:
            self.saver.finish()
        self._is_stopping = news == _STOP
        return self._is_stopping

    def _say(self, text: str) -> None:
        if self.state is not None:
            say(text)


def _differences(saved: dict[str, object], now: dict[str, object]) -> list[str]:
    """Where two descriptions of a run's arithmetic differ."""
    return [
        f"{name} was {saved.get(name, 'not recorded')}, is {value}"
        for name, value in now.items()
        if saved.get(name) != value
    ]
