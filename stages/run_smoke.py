"""Command: runs the real pipeline with tiny parameters, every kind of layout, a kill and resume."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from lib.cli import plain_command
from lib.config.params_file import read_params
from lib.config.run_config import Params
from lib.console import say, table
from lib.errors import UserError
from lib.train.hardware import cuda_device_names
from lib.workflow.one_kill import EXACT, copy_before_training, kill_once
from lib.workflow.scratch import apply_preset, run_pipeline, scratch_copy

_MOST_PROCESSES = 8


@plain_command
@click.option("--preset", default="smoke", show_default=True, help="Parameters: params/NAME.yaml.")
def main(preset: str) -> None:
    """Runs all that a training is made of, tiny, and says whether it is right.

    Every stage with the parameters of a preset, and again, which must do nothing; ten steps on
    layouts of every kind over this machine's GPUs (with less than two: two processes of its CPU),
    whose losses, gradients and weights must equal those of one process; then the training once
    more, killed in a save and resumed, which must end in the same bits.

    All in a scratch copy of the project; prints the seconds of each part.
    """
    gpus = len(cuda_device_names())
    with scratch_copy(Path.cwd()) as project:
        apply_preset(project, preset)
        if gpus:
            (project / "params" / "exact.yaml").write_text(EXACT)
            apply_preset(project, "exact")
        seconds = run_pipeline(project, "validate_config").seconds
        untrained = copy_before_training(project)
        seconds |= run_pipeline(project).seconds
        seconds["second run, nothing to do"] = _timed(lambda: _require_up_to_date(project))
        device, processes = ("cuda", gpus) if gpus > 1 else ("cpu", 2)
        seconds["layouts"] = _timed(lambda: _compare(project, processes, device))
        seconds["kill and resume"] = _timed(lambda: _kill(untrained, project))
        table("smoke run", [(part, f"{spent:.1f} s") for part, spent in seconds.items()])


def _timed(work: Callable[[], None]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def _require_up_to_date(project: Path) -> None:
    if not run_pipeline(project).up_to_date:
        raise UserError("the second dvc repro ran stages: it had nothing to do")


def _compare(project: Path, processes: int, device: Literal["cpu", "cuda"]) -> None:
    """Ten steps on each layout; the table of their distance from one process."""
    from lib.hardware.causes import explain
    from lib.hardware.layouts import STEPS, TOLERANCE, compare_layouts, differing

    params = Params.from_file(read_params(project / "params.yaml"))
    try:
        found = list(compare_layouts(params, min(processes, _MOST_PROCESSES), device))
    except AssertionError as error:
        say(str(error))  # the ranks' tracebacks
        cause = explain(error)
        raise UserError(
            f"a layout does not train here: {cause.seen}: {cause.meaning}; try: {cause.remedy}"
        ) from None
    odd = differing(found)
    rows = [
        (name, *(f"{figure:.1e}" for figure in (d.loss, d.norm, d.gradient[0], d.weight[0])),
         "DIFFERS" if name in odd else "equal")
        for name, d in found
    ]  # fmt: skip
    title = f"largest relative difference from one process on {device}, {STEPS} steps in fp64"
    table(title, rows, headers=("layout", "loss", "norm", "gradient", "weight", ""))
    if odd:
        raise UserError(
            f"{', '.join(odd)}: further than {TOLERANCE:g} from one process: collectives, kernels "
            "or this version of torch give wrong numbers; try python -m stages.check_hardware, and "
            "the versions of requirements.lock"
        )


def _kill(untrained: Path, trained: Path) -> None:
    """The training once more, with a kill in it."""
    account = kill_once(untrained, trained)
    if account.faults:
        raise UserError(
            f"after a kill the training does not resume as it should: {'; '.join(account.faults)} "
            f"(kept in {account.kept}); see that the disk keeps what fsync wrote, and compare "
            "versions with requirements.lock"
        )


if __name__ == "__main__":
    main()
