"""Command: runs the real pipeline with tiny parameters, and sees that a rerun does nothing."""

import signal
import sys
import time
from pathlib import Path

import click

from lib.console import table
from lib.errors import UserError
from lib.workflow.scratch import apply_preset, run_pipeline, scratch_copy


@click.command(context_settings={"max_content_width": 100})
@click.option("--preset", default="smoke", show_default=True, help="Parameters: params/NAME.yaml.")
def main(preset: str) -> None:
    """Runs every stage with the parameters of a preset, then checks that a rerun does nothing."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        smoke(preset)
    except UserError as error:
        raise click.ClickException(str(error)) from None


def smoke(preset: str) -> None:
    """Runs the pipeline twice in a scratch copy and prints the seconds of each stage.

    Raises:
        UserError: a run failed, or the second one found something to do.
    """
    with scratch_copy(Path.cwd()) as project:
        apply_preset(project, preset)
        seconds = run_pipeline(project).seconds
        begin = time.monotonic()
        if not run_pipeline(project).up_to_date:
            raise UserError("the second dvc repro ran stages: it had nothing to do")
        rows = [(stage, f"{spent:.1f} s") for stage, spent in seconds.items()]
        rows.append(("second run, nothing to do", f"{time.monotonic() - begin:.1f} s"))
        table("smoke run", rows)


if __name__ == "__main__":
    main()
