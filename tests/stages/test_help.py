"""What ``--help`` of each stage looks like on a terminal of 80 columns."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

STAGES = sorted(path.stem for path in (Path(__file__).parents[2] / "stages").glob("[!_]*.py"))


def commands(command: click.Command) -> Iterator[click.Command]:
    """A command and those below it."""
    yield command
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from commands(below)


@pytest.mark.parametrize("name", STAGES)
def test_help_fits_80_columns_and_keeps_its_lists(name):
    """click keeps the lines of a list that begins with a backspace, and cuts none of them."""
    for command in commands(importlib.import_module(f"stages.{name}").main):
        text = CliRunner().invoke(command, ["--help"], terminal_width=80).output
        assert text.startswith("Usage:")
        assert "\\b" not in text
        assert not [line for line in text.splitlines() if len(line) > 80]
        for word in ("Reads", "Writes"):
            lines = [line for line in text.splitlines() if f" {word}  " in line]
            assert all(line.startswith(f"  {word}  ") for line in lines)
