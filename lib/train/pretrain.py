"""One worker's whole life: open the state, build, resume, train, publish.

Everything that can refuse the run (the lock, changed code, damaged checkpoints, missing tokens)
comes before the first step, and as much as possible before a GPU is taken.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lib.checkpoint.as_model import whole_parameters
from lib.checkpoint.directory import iteration_path
from lib.checkpoint.fingerprint import code_hash
from lib.checkpoint.lock import lock
from lib.checkpoint.published import publish_model
from lib.checkpoint.resume import ResumePolicy, StateDirectory, open_state, state_path
from lib.checkpoint.run_data import require_tokens
from lib.config.launch_plan import layout_for
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.run_config import RunConfig
from lib.console import copy_to, say
from lib.errors import UserError
from lib.model.flops import MFU_CONVENTION
from lib.train.chosen_attention import with_chosen_attention
from lib.train.loop import train
from lib.train.run_record import begin_record, finish_record
from lib.train.run_state import Provenance, RunState, checkpoint_to_resume
from lib.train.setup import build_training, set_determinism, start_process_group
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
    require_tokens(config.data, config.data.corpora)
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
        found = checkpoint_to_resume(state, config)
        runtime = with_chosen_attention(inputs.runtime, config, device, found)
        parts = build_training(config, runtime, device, layout, inputs.launch.debug)
        stack.callback(parts.close)
        provenance = Provenance.of(record) if is_first else None
        run = RunState(parts, layout, state, inputs.results, provenance)
        stack.callback(run.saver.wait)
        progress = run.resume(found)
        train_iters = config.training.train_iters
        if progress.iteration < train_iters:
            run.mark_training()
            if is_first and parts.at(0).throughput.peak_tflops is not None:
                say(f"MFU in the lines below: {MFU_CONVENTION}")
            if is_first:
                run.show_bar(stack, progress.iteration)
            is_done = train(parts, progress, run.hooks(stop))
            run.saver.finish()
            if not is_done:
                raise Stopped(_what_is_saved(progress.iteration, train_iters))
        _require_unchanged(inputs, config, code_at_start)
        _publish(inputs, run, record)


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


def _what_is_saved(iteration: int, train_iters: int) -> str:
    if iteration == 0:
        return "nothing was trained yet"
    return f"iteration {iteration} of {train_iters} is saved"


def _publish(inputs: PretrainInputs, run: RunState, record: dict[str, object]) -> None:
    """Rank 0: writes ``model/`` and the final figures, and marks the state as finished."""
    config, state = run.config, run.state
    if state is None or run.files is None:
        return
    last = config.training.train_iters
    for row in run.history.rows("train", last)[-1:]:
        run.files.write_live(row, last)
    publish_model(
        inputs.model,
        whole_parameters(iteration_path(run.path, last), config),
        config,
        inputs.tokenizer,
        finish_record(record, state.record),
        run.path / "train.log",
    )
    state.mark_finished()
    say(f"published the model of iteration {last} in {inputs.model}")
