"""Command: runs the real pipeline with tiny parameters, and sees that a rerun does nothing."""

import time
from pathlib import Path

import click

from lib.cli import plain_command
from lib.console import table
from lib.errors import UserError
from lib.workflow.scratch import apply_preset, run_pipeline, scratch_copy


@plain_command
@click.option("--preset", default="smoke", show_default=True, help="Parameters: params/NAME.yaml.")
def main(preset: str) -> None:
    """Runs every stage with the parameters of a preset, then checks that a rerun does nothing.

    All in a scratch copy of the project; prints the seconds of each stage.
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
