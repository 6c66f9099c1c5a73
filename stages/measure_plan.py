"""Command: checks the plan on this machine's GPUs: memory and time of real training steps."""

import gc
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.launch_plan import choose_device
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.params_file import read_params
from lib.config.run_config import RunConfig, resolve
from lib.config.schema import ModelConfig
from lib.console import say, table, warn
from lib.errors import UserError
from lib.output_file import OutputFile
from lib.plan.ceilings import Ceilings, known_ceilings, read_ceilings
from lib.train.hardware import choose_threads, cuda_device_names
from lib.train.memory_crash import memory_error
from lib.workflow.measured_works import Device
from lib.workflow.plan_cases import HEADERS, Case, Checked, RankUse, usual_cases
from lib.workflow.shapes import documents_for
from lib.workflow.step_figures import TimingPlan

if TYPE_CHECKING:
    import torch

_STEPS = 10  # of each case, one more than are taken: batches are read ahead
_PLAN = TimingPlan(warmup=6, steps=3)  # by then a run has settled on CUDA graphs or against them
_WAY = "drydock"
_SECONDS = 900.0


@stage_command
@click.option(
    "--gpus", type=click.IntRange(1), help="At most so many.  [default: all here, up to 2]"
)
@click.option("--model", multiple=True, help="Only cases of this model, such as 7b; repeatable.")
@click.option(
    "--ceilings",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON of measured rates: see docs/planning.md.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write all figures to this file.")
def main(
    params: Path,
    gpus: int | None,
    model: tuple[str, ...],
    ceilings: Path | None,
    json_file: Path | None,
) -> None:
    """Takes real training steps in several layouts and puts the plan beside them.

    Models of 125M to 7B on one GPU, and on two where there are two: the most memory that tensors
    took in 9 steps, what torch held (reserved), and the median time of the last 3. Each run is told
    of as soon as it was measured, and again in the table. Of params.yaml only launch and runtime
    are read. Without a GPU tiny models show that it works.
    """
    file = read_params(params)
    launch, runtime = file.section("launch", LaunchConfig), file.section("runtime", RuntimeConfig)
    names = cuda_device_names()
    device = choose_device(launch, len(names))
    here = 0 if device == "cpu" else min(len(names), gpus or 2)
    rates = None if device == "cpu" else _rates(ceilings, names[0])
    cases = [c for c in usual_cases(runtime, here) if not model or c.shape.name in model]
    if not cases:
        raise UserError(f"--model {', '.join(model)}: no case of it here")
    checked: list[Checked] = []
    with tempfile.TemporaryDirectory(prefix="measure-plan-") as folder:
        for several in _together(cases):
            known = [_as_before(case, checked) for case in several]
            checked += _measure(known, launch, device, Path(folder), rates)
            if json_file is not None:  # what is there stays if this is killed
                text = json.dumps([each.mapping() for each in checked], indent=2) + "\n"
                write_text_atomically(json_file, text)
    if not checked:
        raise UserError("nothing could be measured: see the lines above")
    table("plan and measurement", [each.row() for each in checked], HEADERS)
    if json_file is not None:
        say(f"wrote {json_file}")


def _rates(path: Path | None, name: str) -> Ceilings | None:
    """None for a GPU that nothing is known of: memory is checked all the same."""
    if path is not None:
        return read_ceilings(path)
    try:
        return known_ceilings(name)
    except UserError as error:
        warn(f"step times are not planned: {error}")
        return None


def _together(cases: Sequence[Case]) -> list[list[Case]]:
    """All cases of one rank, for which one process will do; each other one alone."""
    found: list[list[Case]] = []
    for ranks, several in groupby(cases, key=lambda case: case.ranks):
        chosen = list(several)
        found += [chosen] if ranks == 1 else [[case] for case in chosen]
    return found


def _as_before(case: Case, checked: Sequence[Checked]) -> Case:
    """With the attention that the same model was measured with, which saves trying them again."""
    found = (c.work.runtime.attention for c in checked if c.case.shape.name == case.shape.name)
    attention = next(found, case.runtime.attention)
    return replace(case, runtime=case.runtime.model_copy(update={"attention": attention}))


def _measure(
    cases: Sequence[Case],
    launch: LaunchConfig,
    device: Device,
    folder: Path,
    rates: Ceilings | None,
) -> list[Checked]:
    from lib.train.local_ranks import run_on_ranks

    ranks = cases[0].ranks
    what = cases[0].text() if len(cases) == 1 else f"{len(cases)} runs, one after another,"
    say(f"measuring {what} on {ranks} x {device}")
    runs = [(case, _config(case, folder)) for case in cases]
    threads = choose_threads(launch.threads, ranks)
    try:
        by_rank = run_on_ranks(
            ranks,
            measure_cases_on_rank,
            runs,
            device,
            threads,
            rates,
            timeout=_SECONDS,
            device=device,
        )
    except AssertionError as error:
        if memory_error(str(error)) is None:
            raise
        warn(f"{cases[0].text()}: does not fit into these GPUs")
        return []
    checked: list[Checked] = []
    for case, *uses in zip(cases, *by_rank, strict=True):
        taken = [use for use in uses if use is not None]
        if len(taken) == ranks:
            checked.append(Checked.of(case, taken, rates))
            if ranks > 1:
                say(checked[-1].line())
    return checked


def _config(case: Case, folder: Path) -> str:
    """The run configuration of a case as JSON; its tokens are written."""
    from lib.train.random_tokens import describe_tokens, random_corpus

    shape, run = case.shape, case.params
    documents = documents_for(shape, _STEPS, case.layout.data or 1)
    place = folder / f"{shape.vocab_size}-{documents}"
    manifest = place / "manifest.json"
    if not place.exists():
        manifest = random_corpus(place, shape.vocab_size, documents)
    return resolve(run, describe_tokens({"random": manifest}, run)).to_json()


def measure_cases_on_rank(
    runs: Sequence[tuple[Case, str]], device_type: str, threads: int, rates: Ceilings | None
) -> list[RankUse | None]:
    """Takes the steps of some runs, one run after another, in a process group of all ranks.

    The only rank of a group says what each run took as soon as it has, since the caller hears of
    all at the end, or never.

    Args:
        runs: each with its configuration as JSON.
        device_type: ``cuda`` or ``cpu``.
        threads: CPU threads of this rank.
        rates: to plan the time by.

    Returns:
        What each took; None for one that did not fit into the memory of the only rank.
    """
    import torch
    import torch.distributed as dist

    from lib.train.local_ranks import rank_device

    torch.set_num_threads(threads)
    device = rank_device(device_type)
    found: list[RankUse | None] = []
    attention: dict[ModelConfig, str] = {}  # as the first run of each model has found it
    is_alone = dist.get_world_size() == 1
    for case, config_text in runs:
        config = RunConfig.model_validate_json(config_text)
        known = attention.get(config.model, case.runtime.attention)
        runtime = case.runtime.model_copy(update={"attention": known})
        try:
            use = _measure_run(config, runtime, device)
            attention[config.model] = use.attention
            found.append(use)
            if is_alone:
                say(Checked.of(case, [use], rates).line())
        except RuntimeError as error:
            # With others, these wait for this one.
            if not is_alone or memory_error(f"{type(error).__name__}: {error}") is None:
                raise
            found.append(None)
            warn(f"{case.text()}: {str(error).splitlines()[0]}")
        # Models refer to themselves; where one did not fit, all that was built of it does too.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _measure_run(config: RunConfig, runtime: RuntimeConfig, device: "torch.device") -> RankUse:
    import torch
    import torch.distributed as dist

    from lib.train.measuring import MeasuredTraining, repeated_parts
    from lib.workflow.step_timing import time_steps

    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    with MeasuredTraining(config, runtime, device, repeated_parts) as training:
        times = time_steps({_WAY: training.step}, _PLAN, device, dist.get_rank())[_WAY]
        return RankUse(
            training.runtime.attention,
            statistics.median(times.seconds),
            times.peak_bytes if on_gpu else None,
            torch.cuda.max_memory_reserved(device) if on_gpu else None,
            before,
        )


if __name__ == "__main__":
    main()
