"""Command: removes the training states, except those that a run is using.

A state (state/FINGERPRINT) holds the checkpoints, with optimizer, of one configuration. Published
models do not need it; continuing or extending a run does.
"""

import shutil
from pathlib import Path

import click

from lib.checkpoint.lock import lock
from lib.console import say
from lib.errors import UserError


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("state"),
    show_default=True,
    help="Folder of the states.",
)
def main(root: Path) -> None:
    """Removes all states under ROOT; a run continued afterwards starts from the beginning.

    A state that a running training holds is kept.
    """
    folders = sorted(path for path in root.glob("*") if path.is_dir())
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        try:
            with lock(folder, wait_s=0):
                shutil.rmtree(folder)
        except UserError as in_use:
            say(f"kept {folder}: {in_use}")
        else:
            say(f"removed {folder} ({size / 1e6:,.1f} MB)")
    for left_log in root.glob("launch.*.stderr"):
        left_log.unlink()
    if not folders:
        say(f"no states in {root}")


if __name__ == "__main__":
    main()
