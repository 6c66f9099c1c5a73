"""Compares what each stage's code imports with the dependencies that dvc.yaml declares.

DVC reruns a stage when a declared file changed, and only then. A module that a stage reaches
without declaring it would be a change that silently reruns nothing. Imports are read from the
source, so nothing is run.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from lib.config.project import CODE_FOLDERS, declared_code
from lib.errors import UserError


def check_workflow(workflow: Path) -> list[str]:
    """Every gap between imports and dependencies, a line each.

    Raises:
        UserError: the workflow, or a file that a stage imports, cannot be read.
    """
    root = workflow.parent
    problems: list[str] = []
    for stage, declared in declared_code(workflow).items():
        module = root / "stages" / f"{stage}.py"
        if not module.is_file():
            problems.append(f"{stage}: has no module: {module.relative_to(root)} does not exist")
            continue
        imported = import_closure(root, f"stages.{stage}")
        covered = [root / dependency for dependency in declared]
        for path in covered:
            if not path.exists():
                problems.append(f"{stage}: depends on {path.relative_to(root)}: it does not exist")
            elif not any(file.is_relative_to(path) for file in imported):
                problems.append(f"{stage}: depends on {path.relative_to(root)}: never imported")
        problems += [
            f"{stage}: imports {file.relative_to(root)}, which no dep covers"
            for file in sorted(imported)
            if not any(file.is_relative_to(path) for path in covered)
        ]
    return problems


def import_closure(root: Path, module: str) -> set[Path]:
    """Every source file of this project that importing ``module`` may load.

    Raises:
        UserError: a file is not valid Python.
    """
    found: set[Path] = set()
    waiting = list(_files_of(root, module))
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            for name in _imported_names(file):
                waiting += _files_of(root, name)
    return found


def _files_of(root: Path, module: str) -> Iterator[Path]:
    """The files that importing a dotted name runs: its packages' and its own."""
    parts = module.split(".")
    if parts[0] not in CODE_FOLDERS:
        return
    for depth in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:depth])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file


def _imported_names(file: Path) -> tuple[str, ...]:
    """Dotted names in a file's import statements, wherever they stand."""
    try:
        return _names_in(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file}: not valid Python ({error})") from None


@functools.cache
def _names_in(text: str) -> tuple[str, ...]:
    """As `_imported_names`, of a file's contents; stages share most of their files."""
    return tuple(_names_of(ast.parse(text)))


def _names_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
