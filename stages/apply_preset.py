"""Command: merges a preset, params/NAME.yaml, into params.yaml, whose comments stay."""

import subprocess
from pathlib import Path

import click

from lib.atomic import write_text_atomically
from lib.cli import stage_command
from lib.config.operation import CONFIG_SECTIONS
from lib.config.params_file import ParamsFile, parse_params, read_params, read_params_sections
from lib.config.presets import conflicts, merge_preset, preset_path, read_preset, to_text
from lib.console import say
from lib.data.options import DATA_SECTIONS
from lib.errors import InvalidParams, UserError

ALL_SECTIONS = DATA_SECTIONS | CONFIG_SECTIONS


@stage_command
@click.argument("name")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the merged parameters here and leave the parameter file as it is.",
)
def main(params: Path, name: str, output: Path | None) -> None:
    """Sets the keys of preset NAME (params/NAME.yaml) in params.yaml.

    Prints each key, old and new. All other keys and all comments stay as they are; but where a
    preset has the section corpora, it says which corpora there are, and takes the place of others.
    What you have changed since the last commit, to another value than the preset's, is not
    overwritten: the command names it and changes nothing.
    """
    params_file = read_params(params)
    preset = read_preset(preset_path(params.parent / "params", name), ALL_SECTIONS)
    if output is None and (committed := committed_version(params)) is not None:
        refused = conflicts(params_file, preset, committed)
        if refused:
            raise InvalidParams(refused)
    changes = merge_preset(params_file, preset)
    target = output or params
    text = to_text(params_file)
    read_params_sections(parse_params(text, target), ALL_SECTIONS)
    write_text_atomically(target, text)
    for change in changes:
        say(f"{change.field}: {change.old} -> {change.new}")
    say(f"wrote {target} ({len(changes)} keys of preset {name})")


def committed_version(path: Path) -> ParamsFile | None:
    """The file as git's HEAD has it; None without git, a commit or that file in it."""
    command = ["git", "show", f"HEAD:./{path.name}"]
    try:
        shown = subprocess.run(command, cwd=path.parent, capture_output=True, check=True)
        return parse_params(shown.stdout.decode(), path)
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError, UserError):
        return None


if __name__ == "__main__":
    main()
