"""Presets: files of only those keys of params.yaml that differ, merged into it on request.

In ``corpora`` the names are the user's. There a preset says which corpora there are, and those of
params.yaml that it does not name make place: one that it adds inherits the keys, comments included,
of one that goes, as any key that a preset does not have stays as it is. Keys under the name ``*``
are for every corpus that there is.
"""

import copy
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

_CORPORA = "corpora"
_EVERY = "*"


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
    hint = f"did you mean {near[0]}? There are" if near else "there are"
    raise UserError(f"{name}: no such preset in {folder}; {hint}: {', '.join(names)}")


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
    preset = _for_every_corpus(preset, _corpora(params_file))
    changes = _make_place(params_file, _corpora(preset))
    for *above, key in _keys(preset):
        at = (*above, key)
        old = params_file.text(*at)
        target = params_file.root
        for step in above:
            if not isinstance(target.get(step), CommentedMap):
                target[step] = CommentedMap()
            target = target[step]
        target[key] = copy.deepcopy(_value(preset, at))
        changes.append(Change(".".join(at), old, params_file.text(*at)))
    return changes


def conflicts(params_file: ParamsFile, preset: ParamsFile, committed: ParamsFile) -> list[Problem]:
    """Keys that the user has changed since the last commit, to other values than the preset's."""
    names = _corpora(params_file)
    preset = _for_every_corpus(preset, names)
    wanted = _corpora(preset)
    problems: list[Problem] = []
    if wanted and set(names) not in (set(_corpora(committed)), set(wanted)):
        problems.append(_own_change((_CORPORA,), params_file, preset, committed))
    mine, theirs = (
        ParamsFile(file.path, copy.deepcopy(file.root)) for file in (params_file, committed)
    )
    _make_place(mine, wanted)
    _make_place(theirs, wanted)
    problems += [
        _own_change(at, mine, preset, theirs)
        for at in _keys(preset)
        if mine.plain(*at) not in (theirs.plain(*at), preset.plain(*at))
    ]
    return problems


def _own_change(
    at: tuple[str, ...], mine: ParamsFile, preset: ParamsFile, committed: ParamsFile
) -> Problem:
    path = mine.path
    return Problem(
        ".".join(at),
        mine.text(*at),
        f"is your own change (committed: {committed.text(*at)}); the preset would write "
        f"{preset.text(*at)} over it",
        f"commit {path}, undo the change (git checkout -- {path}), or write the preset's value "
        "yourself",
        mine.where(*at),
    )


def _keys(preset: ParamsFile) -> Iterator[tuple[str, ...]]:
    """The path of each key that the preset sets."""
    for section, keys in preset.root.items():
        for key in keys:
            if section == _CORPORA:
                yield from ((section, key, inner) for inner in keys[key])
            else:
                yield section, key


def _value(preset: ParamsFile, at: tuple[str, ...]) -> object:
    node = preset.root
    for step in at[:-1]:
        node = node[step]
    return node[at[-1]]


def _corpora(file: ParamsFile) -> list[str]:
    """The names of the corpora."""
    section = file.root.get(_CORPORA)
    return [str(name) for name in section] if isinstance(section, CommentedMap) else []


def _for_every_corpus(preset: ParamsFile, names: list[str]) -> ParamsFile:
    """The preset with its keys for every corpus written under each name."""
    if _corpora(preset) != [_EVERY]:
        return preset
    root = preset.root.copy()
    root[_CORPORA] = CommentedMap(dict.fromkeys(names, preset.root[_CORPORA][_EVERY]))
    return ParamsFile(preset.path, root)


def _make_place(file: ParamsFile, wanted: list[str]) -> list[Change]:
    """Gives a file the corpora that a preset names, if it names any: renames, removes, adds."""
    present = _corpora(file)
    if not wanted or not present or set(wanted) == set(present):
        return []
    old, section = file.text(_CORPORA), file.root[_CORPORA]
    gone = [name for name in present if name not in wanted]
    new = [name for name in wanted if name not in present]
    for name, successor in zip(gone, new, strict=False):
        _rename(section, name, successor)
    for name in gone[len(new) :]:
        del section[name]
    for name in new[len(gone) :]:
        section[name] = CommentedMap()
    return [Change(_CORPORA, old, file.text(_CORPORA))]


def _rename(section: CommentedMap, name: str, successor: str) -> None:
    """Another name for a key, at its place, with its comment and its line number."""
    place, value = list(section).index(name), section.pop(name)
    section.insert(place, successor, value)
    for notes in (section.ca.items, section.lc.data or {}):
        if name in notes:
            notes[successor] = notes.pop(name)


def to_text(params_file: ParamsFile) -> str:
    """The file's text, with its comments, quotes and spelling of numbers."""
    yaml = editable_yaml()
    yaml.Representer = _Representer
    yaml.width = 10_000  # never break a line that a person wrote
    stream = StringIO()
    yaml.dump(params_file.root, stream)
    return stream.getvalue()
