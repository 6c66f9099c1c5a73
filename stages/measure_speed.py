"""Command: measures training on this machine, beside what one could do plainly.

On GPUs the reference models, beside plain torch, compiled, on one GPU; on a CPU the model of
params.yaml beside the Hugging Face one with the same weights, steps taken in turns. What is timed
is the real step of a training run, on random tokens. Figures of shared or throttled machines drift
from minute to minute; ratios taken in one run are what to compare.
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from lib.cli import stage_command
from lib.config.export_rules import obstacles
from lib.config.launch_plan import choose_device
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.params_file import read_params
from lib.config.run_config import RunConfig, resolve
from lib.config.schema import ParallelConfig
from lib.console import say
from lib.errors import UserError
from lib.model.flops import dense_peak_tflops, training_flops_per_token
from lib.output_file import OutputFile
from lib.train.hardware import choose_threads, cpu_name, cuda_device_names, cuda_memory_bytes
from lib.train.memory_crash import memory_error
from lib.workflow.measured_works import OF_THE_FILE, Device, Machine, Options, Work, works_of
from lib.workflow.shapes import REFERENCES, documents_for, measured_run
from lib.workflow.speed_report import OURS, Measurement, Subject, summaries, tell
from lib.workflow.step_figures import RankFigures, TimingPlan

if TYPE_CHECKING:
    import torch

PLAIN, HUGGING_FACE = "plain-torch", "hugging-face"
_WARMUP = 6  # by then a run has settled on graphs or against them (lib.train.graphs)
_TRACED = 4  # two traces, each after a step that the tracing warms up with
_SECONDS = 3600.0
_QUIET = "99"  # above all levels of the profiler, which tells of its own stages
_AT_LEAST_ONE = click.IntRange(1)


@dataclass(frozen=True)
class Setting:
    """What is the same for all works.

    Attributes:
        device: where to compute.
        launch: section ``launch``.
        runtime: section ``runtime``.
        steps: to time.
        baseline: whether the plain way is measured too.
        profile: folder for traces and kernels; None writes none.
    """

    device: Device
    launch: LaunchConfig
    runtime: RuntimeConfig
    steps: int
    baseline: bool
    profile: Path | None


@stage_command
@click.option(
    "--shape",
    multiple=True,
    type=click.Choice([OF_THE_FILE, *REFERENCES]),
    help="A model; may be given several times.  [default: params on a CPU, on GPUs all that fit]",
)
@click.option("--tensor", type=_AT_LEAST_ONE, help="The layout, as in section parallel.")
@click.option("--pipeline", type=_AT_LEAST_ONE)
@click.option("--data", type=_AT_LEAST_ONE, help="[default: what the GPUs allow]")
@click.option("--sequence", is_flag=True)
@click.option("--sharding", type=click.Choice(["optimizer", "gradients", "parameters"]))
@click.option("--virtual-stages", type=_AT_LEAST_ONE)
@click.option("--micro-batch", type=_AT_LEAST_ONE, help="Samples computed at once.")
@click.option("--micro-batches", type=_AT_LEAST_ONE, help="Of a step, on each copy of the model.")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]))
@click.option("--steps", type=_AT_LEAST_ONE, default=10, show_default=True, help="Timed ones.")
@click.option("--no-baseline", is_flag=True, help="Measure Drydock alone.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write traces and tables of kernels to this folder.",
)
@click.option(
    "--json",
    "json_file",
    type=OutputFile(),
    help="Append a line of JSON per measurement to this file.",
)
def main(params: Path, **options: Unpack[Options]) -> None:
    """Measures training: tokens/s, TFLOP/s, MFU, memory, and where the time goes.

    On GPUs the reference models that fit, on one GPU and on all, or on the layout that is asked
    for; on a CPU the model of params.yaml. Dropout is off.
    """
    file = read_params(params)
    launch, runtime = file.section("launch", LaunchConfig), file.section("runtime", RuntimeConfig)
    if options["recompute"] is not None:
        changed = runtime.model_dump() | {"recompute": options["recompute"]}
        runtime = RuntimeConfig.model_validate(changed)
    machine = Machine("cpu")
    gpus = len(cuda_device_names())
    if choose_device(launch, gpus) == "cuda":
        machine = Machine("cuda", gpus, cuda_memory_bytes())
    profile = options["profile"]
    setting = Setting(
        machine.device, launch, runtime, options["steps"], not options["no_baseline"], profile
    )
    works = works_of(file, options, machine)
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)  # the ranks inherit it
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)
    found: list[Measurement] = []
    for work in works:
        found += _measure(work, setting, found)
    if not found:
        raise UserError("nothing could be measured: see the lines above")
    tell(found, options["json_file"])


def _measure(work: Work, setting: Setting, before: list[Measurement]) -> list[Measurement]:
    """Drydock on this work and, unless it is among those before, the plain way."""
    beside = setting.device == "cpu" and setting.baseline and _can_be_hugging_face(work)
    with tempfile.TemporaryDirectory(prefix="measure-speed-") as folder:
        config = _prepared(work, setting, Path(folder))
        texts = (config.to_json(), setting.runtime.model_dump_json())
        subject = _subject(work, setting, config)
        say(f"measuring {subject.shape} {subject.layout} on {subject.processes} x {setting.device}")
        plan = TimingPlan(_WARMUP, setting.steps, Path(folder), setting.profile, subject.name)
        threads = choose_threads(setting.launch.threads, subject.processes)
        ranks = _on_ranks(subject, measure_on_rank, *texts, setting.device, threads, plan, beside)
        found = summaries(subject, ranks, setting.profile)
        if setting.device == "cpu" or not setting.baseline or _has_plain(subject, before):
            return found
        alone = _subject(replace(work, layout=ParallelConfig(data=1)), setting, config)
        say(f"measuring {alone.shape} in plain torch, compiled, on 1 GPU")
        plan = replace(plan, label=alone.name)
        shape = (subject.micro_batches, subject.micro_batch_size)
        ranks = _on_ranks(alone, measure_plain_on_rank, texts[0], shape, setting.device, plan)
        return found + summaries(alone, ranks, setting.profile)


def _has_plain(subject: Subject, found: list[Measurement]) -> bool:
    """Whether plain torch took the same steps already."""
    wanted = (subject.shape, subject.micro_batch_size)
    return any(
        (each.subject.shape, each.subject.micro_batch_size) == wanted and each.way == PLAIN
        for each in found
    )


def _can_be_hugging_face(work: Work) -> bool:
    """Whether the comparison on a CPU is possible; says why if it is not."""
    from lib.workflow.huggingface_model import require_transformers

    reasons = [str(problem) for problem in obstacles(work.shape.resolved())]
    if work.layout.processes > 1 or work.compute != "fp32":
        reasons.append("it is made in one process and in fp32")
    try:
        require_transformers()
    except UserError as error:
        reasons.append(str(error))
    if reasons:
        say(f"no comparison with the Hugging Face model: {reasons[0]}")
    return not reasons


def _prepared(work: Work, setting: Setting, folder: Path) -> RunConfig:
    """The run, on random tokens that are written to the folder."""
    from lib.train.random_tokens import random_tokens

    run = measured_run(work.shape, work.layout, work.compute)
    steps = _WARMUP + setting.steps + _TRACED
    documents = documents_for(work.shape, steps, work.layout.data or 1)
    return resolve(run, random_tokens(folder, run, work.shape.vocab_size, documents))


def _subject(work: Work, setting: Setting, config: RunConfig) -> Subject:
    shape, copies = work.shape, work.layout.data or 1
    padded = config.derived.padded_vocab_size
    peak = dense_peak_tflops(cuda_device_names()[0]) if setting.device == "cuda" else None
    return Subject(
        shape=shape.name,
        parameters=shape.num_parameters(),
        device=setting.device,
        layout=work.layout.name,
        pipeline=work.layout.pipeline,
        processes=work.layout.processes,
        micro_batch_size=shape.micro_batch_size,
        micro_batches=shape.micro_batches,
        tokens_per_step=shape.micro_batch_size * shape.micro_batches * copies * shape.seq_length,
        compute=work.compute,
        recompute=setting.runtime.recompute,
        flops_per_token=training_flops_per_token(config.model, shape.seq_length, padded),
        peak_tflops=peak,
    )


def _on_ranks(
    subject: Subject, function: Callable[..., RankFigures], *arguments: object
) -> list[RankFigures]:
    """Runs a function on ranks; gives nothing, after a line, where a GPU's memory is too small."""
    from lib.train.local_ranks import run_on_ranks

    size, device = subject.processes, subject.device
    try:
        return run_on_ranks(size, function, *arguments, timeout=_SECONDS, device=device)
    except AssertionError as error:
        if memory_error(str(error)) is None:
            raise
        say("  the GPU's memory is too small; a smaller --micro-batch or --recompute may do")
        return []


def measure_on_rank(
    config_text: str,
    runtime_text: str,
    device_type: Device,
    threads: int,
    plan: TimingPlan,
    beside: bool,
) -> RankFigures:
    """One rank's part of measuring Drydock, in a process group of all ranks.

    Args:
        config_text: the run configuration as JSON.
        runtime_text: section ``runtime`` as JSON.
        device_type: where to compute.
        threads: CPU threads of this rank.
        plan: how to time.
        beside: whether the Hugging Face model takes its steps in turns with Drydock.
    """
    import torch
    import torch.distributed as dist

    from lib.train.local_ranks import rank_device
    from lib.train.measuring import MeasuredTraining
    from lib.workflow.huggingface_model import HuggingFaceModel
    from lib.workflow.plain_steps import PlainSteps
    from lib.workflow.step_timing import Step, time_steps

    config = RunConfig.model_validate_json(config_text)
    runtime = RuntimeConfig.model_validate_json(runtime_text)
    device = rank_device(device_type)
    torch.set_num_threads(threads)
    with MeasuredTraining(config, runtime, device) as training:
        ways: dict[str, Step] = {OURS: training.step}
        if beside:
            weights = training.whole_weights()
            model = HuggingFaceModel(config.model, config.data.vocab_size, weights)
            batches = training.batches_from_start()
            ways[HUGGING_FACE] = PlainSteps(model, batches, config.optimizer)
        times = time_steps(ways, plan, device, dist.get_rank())
        timed = training.rows[plan.warmup : plan.warmup + plan.steps]
        waited = statistics.median(row.data_wait_ms for row in timed)
        return RankFigures(_device_name(device), training.runtime.attention, waited, times)


def measure_plain_on_rank(
    config_text: str, batches: tuple[int, int], device_type: Device, plan: TimingPlan
) -> RankFigures:
    """Measures the plain torch model, compiled, as the one rank of a process group.

    Args:
        config_text: the run configuration as JSON; its layout does not matter.
        batches: micro batches of a step, and samples of each.
        device_type: where to compute.
        plan: how to time.
    """
    from lib.train.local_ranks import rank_device
    from lib.workflow.plain_steps import compiled_plain_steps
    from lib.workflow.step_timing import time_steps

    config = RunConfig.model_validate_json(config_text)
    device = rank_device(device_type)
    vocab_size, shape = config.data.vocab_size, (*batches, config.training.seq_length)
    step = compiled_plain_steps(config.model, vocab_size, shape, config.optimizer, device)
    return RankFigures(_device_name(device), "", 0.0, time_steps({PLAIN: step}, plan, device, 0))


def _device_name(device: "torch.device") -> str:
    import torch

    return cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


if __name__ == "__main__":
    main()
