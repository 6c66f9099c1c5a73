"""Compares what each stage's code imports with the dependencies that dvc.yaml declares.

DVC reruns a stage when a declared file changed, and only then. A module that a stage reaches
without declaring it would be a change that silently reruns nothing. Imports are read from the
source, so nothing is run.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

from lib.errors import UserError

_OWN_PACKAGES = ("stages", "lib", "kernels")


def check_workflow(workflow: Path) -> list[str]:
    """Every gap between imports and dependencies, a line each."""
    root = workflow.parent
    problems: list[str] = []
    for stage, declared in declared_code(workflow).items():
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


def declared_code(workflow: Path) -> dict[str, list[str]]:
    """For each stage the dependencies that are code: files and folders."""
    stages = YAML(typ="safe").load(workflow)["stages"]
    return {
        stage: [dep for dep in definition["deps"] if Path(dep).parts[0] in _OWN_PACKAGES]
        for stage, definition in stages.items()
    }


def import_closure(root: Path, module: str) -> set[Path]:
    """Every source file of this project that importing ``module`` may load."""
    found: set[Path] = set()
    waiting = list(_files_of(root, module))
    if not waiting:
        raise UserError(f"module {module} has no source file in {root}")
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
    if parts[0] not in _OWN_PACKAGES:
        return
    for depth in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:depth])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file


def _imported_names(file: Path) -> Iterator[str]:
    """Dotted names in a file's import statements, wherever they stand."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
