"""Command: measures how long checkpoints take to save and to load on this machine.

The real parts of a training run take steps on random tokens and save and load as a run does, on
processes that this command starts, or on those of torchrun.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from lib.cli import stage_command
from lib.config.data_section import DataSection
from lib.config.launch_plan import choose_device, layout_for, process_count
from lib.config.operation import CONFIG_SECTIONS, LaunchConfig, RuntimeConfig
from lib.config.params_file import read_params
from lib.config.presets import merge_preset, preset_path, read_preset
from lib.config.project import state_root
from lib.config.rules import broken_rules
from lib.config.run_config import Params, RunConfig, resolve
from lib.config.schema import ModelSection, ScheduleSection, TrainingSection
from lib.console import say, table
from lib.data.options import DATA_SECTIONS, TokenizerOptions
from lib.errors import InvalidParams
from lib.train.hardware import choose_threads, cuda_device_names

if TYPE_CHECKING:
    from lib.workflow.checkpoint_speed import Figures

# Unless a model is named: 24 layers of 2048 on a GPU, that of the parameter file on a CPU.
GPU_PRESET = "llama_1.4b_4gpu"
STEPS = 5
_HEAD_DIM = 64
_SECONDS = 3600.0
_SECTIONS = DATA_SECTIONS | CONFIG_SECTIONS


@dataclass(frozen=True)
class Plan:
    """What to measure, and on what.

    Attributes:
        run: the sections of the run.
        runtime: section ``runtime``.
        vocab_size: tokens are drawn from so many.
        device: where to compute.
        processes: ranks.
        threads: CPU threads of each rank.
        rounds: of all measurements.
    """

    run: Params
    runtime: RuntimeConfig
    vocab_size: int
    device: Literal["cpu", "cuda"]
    processes: int
    threads: int
    rounds: int


@stage_command
@click.option("--preset", help="A model of params/NAME.yaml.  [default on a GPU: the 1.4B one]")
@click.option("--layers", type=click.IntRange(1), help="So many layers in place of the model's.")
@click.option("--hidden", type=click.IntRange(1), help="So wide in place of the model's width.")
@click.option("--rounds", type=click.IntRange(2), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, for programs.")
def main(
    params: Path,
    preset: str | None,
    layers: int | None,
    hidden: int | None,
    rounds: int,
    as_json: bool,  # click passes options by name
) -> None:
    """Measures saving and loading checkpoints on the disk of $DRYDOCK_STATE, else of state/.

    Layout, batch and processes are those of the parameter file; parallel.data: null takes all
    GPUs. The disk needs room for two checkpoints, which are removed in the end.
    """
    plan = _plan(params, preset, {"num_layers": layers, "hidden_size": hidden}, rounds)
    root = state_root()
    root.mkdir(parents=True, exist_ok=True)
    figures = _with_torchrun(plan, root) if _is_torchruns() else _with_own_ranks(plan, root)
    if figures is None:  # the first rank speaks
        return
    model = plan.run.model
    if as_json:
        what = {"layers": model.num_layers, "hidden": model.hidden_size, "device": plan.device}
        say(json.dumps(what | {"processes": plan.processes} | asdict(figures), indent=2))
        return
    title = (
        f"a checkpoint of {figures.bytes / 1e9:.3g} GB in {figures.files} files: "
        f"{model.num_layers} layers of {model.hidden_size}, {plan.processes} x {plan.device}"
    )
    table(title, figures.rows(), headers=("", "seconds", "GB/s", "of plain files"))


def _is_torchruns() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _plan(params: Path, preset: str | None, sizes: dict[str, int | None], rounds: int) -> Plan:
    """What the parameter file, the options and the machine come to."""
    file = read_params(params)
    launch = file.section("launch", LaunchConfig)
    runtime = file.section("runtime", RuntimeConfig)
    parallel = Params.from_file(file).parallel
    gpus = len(cuda_device_names())
    device = choose_device(launch, gpus)
    given = {name: size for name, size in sizes.items() if size is not None}
    if preset is None and device == "cuda" and not given:
        preset = GPU_PRESET
    if preset is not None:
        path = preset_path(params.parent / "params", preset)
        merge_preset(file, read_preset(path, _SECTIONS))
    sections = replace(Params.from_file(file), parallel=parallel)
    vocab_size = file.section("tokenizer", TokenizerOptions).vocab_size
    unit = parallel.tensor * parallel.pipeline
    processes = launch.processes or unit * (parallel.data or max(1, gpus // unit))
    if _is_torchruns():
        processes = int(os.environ["WORLD_SIZE"])
    run = _short_run(sections, given, processes // unit)
    _require_that_it_fits(run, vocab_size)
    if _is_torchruns():  # perhaps on several machines, so these GPUs are not all
        layout_for(run, processes)
    else:
        process_count(run, launch.model_copy(update={"processes": processes}), gpus)
    threads = choose_threads(launch.threads, processes)
    return Plan(run, runtime, vocab_size, device, processes, threads, rounds)


def _short_run(params: Params, sizes: dict[str, int], copies: int) -> Params:
    """The run with another size and few micro batches a step, without validation."""
    model, stages = params.model, params.parallel.pipeline
    if "hidden_size" in sizes:
        heads = max(1, sizes["hidden_size"] // _HEAD_DIM)
        derived = {"head_dim": _HEAD_DIM, "ffn_hidden_size": None, "num_query_groups": None}
        model = model.model_copy(update={"num_attention_heads": heads, **derived})
    given = params.training
    training = TrainingSection(
        seed=given.seed,
        seq_length=given.seq_length,
        micro_batch_size=given.micro_batch_size,
        global_batch_size=given.micro_batch_size * max(1, copies) * max(2, 2 * stages),
        train_iters=1_000_000,
    )
    return replace(
        params,
        data=DataSection(),
        corpora=("random",),
        model=ModelSection.model_validate(model.model_dump() | sizes),
        schedule=ScheduleSection(decay="constant"),
        training=training,
    )


def _require_that_it_fits(run: Params, vocab_size: int) -> None:
    """Refuses a model that the layout cannot divide, before processes start."""
    sections = {"model": run.model, "parallel": run.parallel, "training": run.training}
    if problems := broken_rules(sections | {"vocab_size": vocab_size}):
        raise InvalidParams(problems)


def _with_own_ranks(plan: Plan, root: Path) -> "Figures":
    from lib.train.local_ranks import run_on_ranks

    with tempfile.TemporaryDirectory(prefix="measure-", dir=root) as folder:
        config = _prepared(plan, Path(folder))
        found = run_on_ranks(
            plan.processes,
            measure_on_rank,
            config.to_json(),
            plan.runtime.model_dump_json(),
            folder,
            *(plan.device, plan.threads, plan.rounds),
            timeout=_SECONDS,
            device=plan.device,
        )
    return found[0]


def _with_torchrun(plan: Plan, root: Path) -> "Figures | None":
    """As one of torchrun's processes; gives the figures on the first."""
    import torch.distributed as dist

    from lib.checkpoint.ranks import on_rank_zero
    from lib.train.setup import start_process_group

    start_process_group(plan.device)
    is_first = dist.get_rank() == 0
    folder = Path(on_rank_zero(lambda: tempfile.mkdtemp(prefix="measure-", dir=root)))
    try:
        text = on_rank_zero(lambda: _prepared(plan, folder).to_json())
        runtime, options = plan.runtime.model_dump_json(), (plan.device, plan.threads, plan.rounds)
        figures = measure_on_rank(text, runtime, str(folder), *options)
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()
    return figures if is_first else None


def _prepared(plan: Plan, folder: Path) -> RunConfig:
    """The run on random tokens, written to the folder; looks whether the disk has room."""
    from lib.checkpoint.saving import require_space
    from lib.checkpoint.shapes import parameter_shapes
    from lib.train.random_tokens import random_tokens
    from lib.workflow.checkpoint_speed import COPIES_ON_DISK

    run, vocab_size = plan.run, plan.vocab_size
    documents = 200 + run.training.seq_length  # of 70 tokens on average
    config = resolve(run, random_tokens(folder, run, vocab_size, documents))
    shapes = parameter_shapes(config.model, config.derived.padded_vocab_size).values()
    each = 8 if run.precision.compute == "fp64" else 4
    weights = sum(math.prod(shape) for shape in shapes)
    require_space(folder, COPIES_ON_DISK * 3 * each * weights)  # a weight has two moments
    return config


def measure_on_rank(
    config_text: str, runtime_text: str, folder: str, device_type: str, threads: int, rounds: int
) -> "Figures":
    """One rank's part, in a process group of all ranks.

    Args:
        config_text: the run configuration as JSON.
        runtime_text: section ``runtime`` as JSON.
        folder: of the run's tokens; checkpoints are written there.
        device_type: ``cpu`` or ``cuda``.
        threads: CPU threads of this rank.
        rounds: of all measurements.
    """
    import torch
    import torch.distributed as dist

    from lib.checkpoint.state import random_streams, training_tensors
    from lib.train.local_ranks import rank_device
    from lib.train.setup import build_training
    from lib.train.step import Progress, train_step
    from lib.workflow.checkpoint_speed import Subject, measure

    config = RunConfig.model_validate_json(config_text)
    runtime = RuntimeConfig.model_validate_json(runtime_text)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(threads)
    device = rank_device(device_type)
    parts = build_training(config, runtime, device, layout_for(config, size))
    parts.model.chunks.train()
    progress = Progress()

    def tensors() -> dict[str, torch.Tensor]:
        own = training_tensors(parts.model.own_parameters().items(), parts.optimizer)
        return own | random_streams(rank, device, parts.groups.shard_stream)

    subject = Subject(lambda: train_step(parts, progress), tensors, Path(folder), STEPS, rounds)
    with contextlib.redirect_stdout(sys.stderr):  # the figures alone go to standard output
        figures = measure(subject)
    parts.close()
    return figures


if __name__ == "__main__":
    main()
