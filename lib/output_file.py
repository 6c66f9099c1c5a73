"""The type of an option that names a file to write."""

import os
from pathlib import Path

import click


class OutputFile(click.Path):
    """A file to write; one that cannot be written is refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """The path. Folders that are missing are made when it is written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = next(each for each in path.absolute().parents if os.path.lexists(each))
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            self.fail(f"{path}: {folder} is no folder that can be written to", param, ctx)
        return path
