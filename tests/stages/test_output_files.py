"""A file to write is refused before the work where it cannot be written."""

import importlib
import pkgutil

import click
import pytest
from click.testing import CliRunner

import stages
from lib.cli import plain_command
from lib.output_file import OutputFile


def written_files(command):
    """The options of a command, and of those in it, that name a file to write, by their names."""
    for each in getattr(command, "commands", {}).values():
        yield from written_files(each)
    for option in command.params:
        if isinstance(option.type, click.Path) and {"--json", "--picture", "--out"} & {
            *option.opts
        }:
            yield option


def test_every_file_that_is_written_is_tried_first():
    found = {
        (name, *option.opts): type(option.type)
        for _, name, _ in pkgutil.iter_modules(stages.__path__)
        for option in written_files(importlib.import_module(f"stages.{name}").main)
    }
    assert len(found) >= 7
    assert set(found.values()) == {OutputFile}, found


@plain_command
@click.option("--json", "path", type=OutputFile())
def work(path):
    click.echo(f"works for {path}")


def test_nothing_is_written_before_the_work(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    done = CliRunner().invoke(work, [f"--json={path}"])
    assert done.output == f"works for {path}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file/inside", "file/further/inside", "folder", "nowhere/file"])
def test_what_cannot_be_written_is_refused_in_a_line(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    done = CliRunner().invoke(work, [f"--json={tmp_path / name}"])
    assert done.exit_code == 2
    assert "Error: Invalid value for '--json'" in done.output
    assert "works" not in done.output
