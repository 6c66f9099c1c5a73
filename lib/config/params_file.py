"""Reads a parameter file strictly: every wrong key and value is named, with its line.

Knows no section. A caller hands the typed model of the section that it wants::

    options = read_params(Path("params.yaml")).section("tokens", TokensOptions)

Values are checked by the model's types, with these allowances for how people (and DVC, which
rewrites the file) spell numbers: ``1e-4``, ``'1e-4'`` and ``1`` are good floats, ``4.0``, ``1e9``
and ``'16'`` are good integers. Nothing else is bent: 2.5 is no integer, true is no number, yes is
no truth value, 010 (eight or ten?) and infinities are refused.

A section may also be a mapping of names, which are the user's, to entries of one model: see
``lib.config.params_problems.entry_model``.

A model's validators may raise ``InvalidParams`` with problems whose fields are relative to the
section, or a ``ValueError`` with the text "key = value: rule; remedy" (several joined by "; and ").
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from lib.config.params_problems import (
    Finding,
    KnownKeys,
    Location,
    describe_error,
    dotted,
    entry_model,
    location_of,
    show,
    unknown_key,
    width_with_zeros,
)
from lib.errors import InvalidParams, Problem, UserError

M = TypeVar("M", bound=BaseModel)

_NAMES = "lib.config.params_problems.unknown_key"

# What JSON can say: a part of the file with ruamel's classes taken off.
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


@dataclass(frozen=True)
class ParamsFile:
    """A parameter file as read: its path and its top-level mapping with line numbers."""

    path: Path
    root: CommentedMap

    def section(self, name: str, model: type[M]) -> M:
        """The section ``name`` as a ``model``.

        Raises:
            InvalidParams: with every problem of the section at once.
        """
        value, problems = _parse_section(self, name, model, {name: _keys_of(model)})
        if value is None:
            raise InvalidParams(problems)
        return value

    def where(self, *location: str | int) -> str:
        """``FILE:LINE`` of a key, or of the innermost part of its path that is in the file."""
        line = self._find(location)[1]
        return str(self.path) if line is None else f"{self.path}:{line + 1}"

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Problems with the lines of their fields, in the order of the file."""
        found = (
            replace(each, where=each.where or self.where(*location_of(each.field)))
            for each in problems
        )
        return in_file_order(found)

    def text(self, *location: str | int) -> str:
        """The value at a path as a message shows it; ``(missing)`` where there is none."""
        node, _line, found = self._find(location)
        return show(node) if found else "(missing)"

    def plain(self, *location: str | int) -> Plain:
        """The value at a path without ruamel's classes, so that two can be compared."""
        node, _line, found = self._find(location)
        return _to_plain(node) if found else None

    def _find(self, location: Location) -> tuple[object, int | None, bool]:
        """The innermost part of a path that is in the file, its line, whether that is all."""
        node: object = self.root
        line: int | None = None
        for step in location:
            if isinstance(node, CommentedSeq):
                is_there = isinstance(step, int) and step < len(node)
            else:
                is_there = isinstance(node, CommentedMap) and step in node
            if not is_there or not isinstance(node, CommentedMap | CommentedSeq):
                return node, line, False
            line, node = _line_of(node, step), node[step]
        return node, line, True


def _line_of(node: CommentedMap | CommentedSeq, step: str | int) -> int | None:
    """Where a key or entry is in the file; None for one that was added after reading."""
    places = node.lc.data or {}
    return places[step][0] if step in places else None


def read_params(path: Path) -> ParamsFile:
    """Reads a parameter file as YAML 1.2; a key that appears twice is an error.

    Raises:
        UserError: the file is missing, empty, not YAML or not a mapping of sections.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; run from the project's folder or name it by --params FILE"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_params(text, path)


def parse_params(text: str, path: Path) -> ParamsFile:
    """As ``read_params``, from text; ``path`` only names it in messages."""
    try:
        root = editable_yaml().load(text)
    except MarkedYAMLError as error:
        raise UserError(_describe_yaml_error(path, error)) from None
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if root is None:
        raise UserError(f"{path}: the file is empty; restore it: git checkout -- {path.name}")
    if not isinstance(root, CommentedMap):
        raise UserError(
            f"{path}:1: the file must be a mapping of sections; begin with a line like 'model:'"
        )
    return ParamsFile(path, root)


def editable_yaml() -> YAML:
    """A reader and writer of YAML 1.2 that keeps comments, quotes and the spelling of numbers."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    return yaml


def _describe_yaml_error(path: Path, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = str(path) if mark is None else f"{path}:{mark.line + 1}"
    problem = " ".join(str(error.problem or error.context).split())
    if isinstance(error, DuplicateKeyError):
        problem = problem.replace("found duplicate key", "the key appears twice:")
        return f"{place}: {problem}; remove one of the two lines"
    if "\\t" in problem:
        return f"{place}: a tab in the indentation; YAML indents by spaces only"
    return f"{place}: not valid YAML: {problem}; check indentation, quotes and brackets near here"


def read_params_sections(
    params_file: ParamsFile, models: Mapping[str, type[BaseModel]]
) -> dict[str, BaseModel]:
    """All sections of a file, where ``models`` names every section that there may be.

    Raises:
        InvalidParams: with the problems of all sections, unknown sections included.
    """
    sections, problems = check_params_sections(params_file, models)
    if problems:
        raise InvalidParams(in_file_order(problems))
    return sections


def check_params_sections(
    params_file: ParamsFile, models: Mapping[str, type[BaseModel]]
) -> tuple[dict[str, BaseModel], list[Problem]]:
    """As ``read_params_sections``, but gives the sound sections beside the problems."""
    known = {name: _keys_of(model) for name, model in models.items()}
    problems = [_problem(params_file, finding) for finding in _unknown_sections(params_file, known)]
    sections: dict[str, BaseModel] = {}
    for name, model in models.items():
        value, found = _parse_section(params_file, name, model, known)
        problems += found
        if value is not None:
            sections[name] = value
    return sections, problems


def unknown_keys(params_file: ParamsFile, models: Mapping[str, type[BaseModel]]) -> list[Problem]:
    """Sections and keys that ``models`` do not have, and sections that are no mappings.

    For a file that holds only some of the keys, where a missing one is no mistake.
    """
    known = {name: _keys_of(model) for name, model in models.items()}
    findings = list(_unknown_sections(params_file, known))
    places = [((section,), keys) for section, keys in params_file.root.items() if section in known]
    for at, keys in places:
        model = models[at[0]]
        if not isinstance(keys, CommentedMap):
            findings.append(Finding(at, "must be a mapping of keys", "write its keys"))
        elif len(at) == 1 and entry_model(model) is not model:
            places += [((*at, name), entry) for name, entry in keys.items()]
        else:
            wrong = [str(key) for key in keys if key not in known[at[0]]]
            findings += [unknown_key((*at, key), known) for key in wrong]
    return [_problem(params_file, finding) for finding in findings]


def _unknown_sections(params_file: ParamsFile, known: KnownKeys) -> Iterator[Finding]:
    for key in params_file.root:
        if key not in known:
            yield unknown_key((str(key),), known)


def in_file_order(problems: Iterable[Problem]) -> list[Problem]:
    """Problems sorted by line, as a person walks through the file."""

    def line(problem: Problem) -> int:
        number = problem.where.rpartition(":")[2]
        return int(number) if number.isdigit() else 0

    return sorted(problems, key=line)


def _keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    fields = entry_model(model).model_fields
    return tuple(field.alias or name for name, field in fields.items())


def _parse_section(
    params_file: ParamsFile, name: str, model: type[M], known: KnownKeys
) -> tuple[M | None, list[Problem]]:
    """The section as a model (None where it has problems) and its problems."""
    raw, source = params_file.root.get(name), f"{model.__module__}.{model.__name__}"
    if raw is not None and not isinstance(raw, CommentedMap):
        rule = "must be a section, a mapping of keys"
        remedy = f"write its keys below '{name}:', indented by two spaces"
        return None, [_problem(params_file, Finding((name,), rule, remedy), source)]
    value, errors = _validate(_to_plain(raw) or {}, model)
    findings = list(_odd_numbers(raw, (name,)))
    odd_places = {finding.at for finding in findings}
    for error in errors:
        described = describe_error(error, name, model, known)
        findings += [finding for finding in described if finding.at not in odd_places]
    problems = [_problem(params_file, finding, source) for finding in findings]
    return (None if problems else value), problems


def _to_plain(node: object) -> Plain:
    """Takes ruamel's classes off; whole floats become integers, as JSON's readers expect."""
    if isinstance(node, Mapping):
        return {str(key): _to_plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_to_plain(value) for value in node]
    if isinstance(node, float):
        return int(node) if math.isfinite(node) and node.is_integer() else node
    return node if node is None or isinstance(node, int) else str(node)


def _odd_numbers(node: object, at: Location) -> Iterator[Finding]:
    """Numbers that no field may hold, each with its rule and remedy."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _odd_numbers(value, (*at, str(key)))
    elif isinstance(node, list):
        for position, value in enumerate(node):
            yield from _odd_numbers(value, (*at, position))
    elif isinstance(node, float) and not math.isfinite(node):
        yield Finding(at, "must be finite", "write an ordinary number")
    elif width_with_zeros(node):
        yield Finding(at, "a leading zero is ambiguous (octal or decimal)", f"write {node}")


def _validate(plain: Plain, model: type[M]) -> tuple[M | None, list[ErrorDetails]]:
    """Strict validation; numbers in quotes get a second chance where a number is wanted."""
    for last_try in (False, True):
        try:
            return model.model_validate_json(json.dumps(plain), strict=True), []
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
            unquoted = [_unquote_number(plain, error) for error in errors]
            if last_try or not any(unquoted):
                return None, errors
    raise AssertionError("the last try returns")


def _unquote_number(plain: Plain, error: ErrorDetails) -> bool:
    """Replaces text that spells a number, where the model wants one; True if it did."""
    text = error["input"]
    if error["type"] not in ("int_type", "float_type") or not isinstance(text, str):
        return False
    try:
        number = float(text) if not text.strip("+-").isdigit() else int(text)
    except ValueError:
        return False
    has_leading_zero = text.strip("+-").startswith("0") and text.strip("+-0").isdigit()
    if not math.isfinite(number) or has_leading_zero or "_" in text:
        return False
    node = plain
    for step in error["loc"][:-1]:
        node = _child(node, step)
    last, whole = error["loc"][-1], float(number).is_integer()
    if isinstance(node, dict):
        node[str(last)] = int(number) if whole else number
    elif isinstance(node, list) and isinstance(last, int):
        node[last] = int(number) if whole else number
    return True


def _child(node: Plain, step: str | int) -> Plain:
    if isinstance(node, list) and isinstance(step, int):
        return node[step]
    return node.get(str(step)) if isinstance(node, dict) else None


def _problem(params_file: ParamsFile, finding: Finding, source: str = _NAMES) -> Problem:
    at = finding.at
    value, where = params_file.text(*at), params_file.where(*at)
    return Problem(dotted(at), value, finding.rule, finding.remedy, where, source)
