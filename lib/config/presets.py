"""Presets: files of only those keys of params.yaml that differ, merged into it on request."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pydantic import BaseModel
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from lib.config.params_file import ParamsFile, editable_yaml, read_params, unknown_keys
from lib.config.params_problems import nearest_keys
from lib.errors import InvalidParams, Problem, UserError


@dataclass(frozen=True)
class Change:
    """A key that a preset sets: its dotted name, and the values as text."""

    field: str
    old: str
    new: str


class _Representer(RoundTripRepresenter):
    """Writes null as a word: an empty value looks forgotten."""

    def represent_null(self, _data: None) -> ScalarNode:
        """The word null."""
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(type(None), _Representer.represent_null)


def preset_path(folder: Path, name: str) -> Path:
    """The file of a preset.

    Raises:
        UserError: there is no such preset; names those that there are.
    """
    path = folder / f"{name}.yaml"
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if name in names:
        return path
    near = nearest_keys(name, names)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"{name}: no such preset in {folder}; {hint}There are: {', '.join(names)}")


def read_preset(path: Path, models: Mapping[str, type[BaseModel]]) -> ParamsFile:
    """Reads a preset.

    Raises:
        UserError: the file cannot be read, or (``InvalidParams``) has keys that ``models`` lack.
    """
    preset = read_params(path)
    if problems := unknown_keys(preset, models):
        raise InvalidParams(problems)
    return preset


def merge_preset(params_file: ParamsFile, preset: ParamsFile) -> list[Change]:
    """Sets the preset's keys in ``params_file``, in place; comments stay."""
    changes = []
    for section, key in _keys(preset):
        old = params_file.text(section, key)
        target = params_file.root.get(section)
        if not isinstance(target, CommentedMap):
            target = CommentedMap()
            params_file.root[section] = target
        target[key] = preset.root[section][key]
        changes.append(Change(f"{section}.{key}", old, params_file.text(section, key)))
    return changes


def conflicts(params_file: ParamsFile, preset: ParamsFile, committed: ParamsFile) -> list[Problem]:
    """Keys that the user has changed since the last commit, to other values than the preset's."""
    problems = []
    for section, key in _keys(preset):
        mine, wanted = params_file.plain(section, key), preset.plain(section, key)
        if mine not in (committed.plain(section, key), wanted):
            problems.append(
                Problem(
                    f"{section}.{key}",
                    params_file.text(section, key),
                    f"is your own change (committed: {committed.text(section, key)}); the preset "
                    f"would write {preset.text(section, key)} over it",
                    f"commit {params_file.path}, undo the change (git checkout -- "
                    f"{params_file.path}), or write the preset's value yourself",
                    params_file.where(section, key),
                )
            )
    return problems


def _keys(preset: ParamsFile) -> Iterator[tuple[str, str]]:
    for section, keys in preset.root.items():
        for key in keys:
            yield section, key


def to_text(params_file: ParamsFile) -> str:
    """The file's text, with its comments, quotes and spelling of numbers."""
    yaml = editable_yaml()
    yaml.Representer = _Representer
    yaml.width = 10_000  # never break a line that a person wrote
    stream = StringIO()
    yaml.dump(params_file.root, stream)
    return stream.getvalue()
