"""Command: compares what each stage's code imports with the dependencies dvc.yaml declares."""

from pathlib import Path

import click

from lib.cli import plain_command
from lib.console import say
from lib.workflow.import_closure import check_workflow


@plain_command
@click.option(
    "--workflow",
    type=click.Path(path_type=Path),
    default=Path("dvc.yaml"),
    show_default=True,
    help="The workflow; code is looked up beside it.",
)
def main(workflow: Path) -> None:
    """Checks that every stage of dvc.yaml declares all code that it can reach, and no other.

    Imports are read from the source (also those inside functions), so nothing is run. Exit status
    1 and one line for each file that a stage imports and no dependency covers, and for each code
    dependency that does not exist or that the stage does not import.
    """
    problems = check_workflow(workflow)
    for problem in problems:
        say(problem)
    if problems:
        raise SystemExit(1)
    say(f"{workflow}: the code of every stage is covered by its deps")


if __name__ == "__main__":
    main()
