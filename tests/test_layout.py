"""The rules of the house that no other tool keeps: sizes, names, the tree, and clean texts."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.workflow.scratch import source_files

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
BINARY = {".png", ".model", ".gz", ".zst", ".parquet", ".bin", ".idx"}

SOURCES = [path for path in source_files(ROOT) if path.suffix not in BINARY]
PYTHON = [path for path in SOURCES if path.suffix == ".py"]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_there_is_something_to_look_at() -> None:
    assert len(PYTHON) > 50
    assert ROOT / "dvc.yaml" in SOURCES


def test_no_file_is_too_long() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in PYTHON}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{name_of(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in PYTHON
        for node in functions(path)
    }
    assert {name: count for name, count in lengths.items() if count > MAX_FUNCTION_LINES} == {}


def test_no_function_takes_too_much() -> None:
    too_many = {}
    for path in PYTHON:
        if path.is_relative_to(ROOT / "kernels") or path.is_relative_to(ROOT / "tests"):
            continue  # a kernel's pointers and strides, a test's fixtures
        for node in functions(path):
            arguments = node.args
            names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
            count = len([name for name in names if name not in ("self", "cls", "ctx")])
            count += len(arguments.kwonlyargs)
            if count > MAX_PARAMETERS:
                too_many[f"{name_of(path)}:{node.lineno} {node.name}"] = count
    assert too_many == {}


def test_no_grab_bag_names() -> None:
    names = {name_of(path) for path in PYTHON if path.stem in FORBIDDEN_NAMES}
    names |= {name_of(path) for path in PYTHON if path.parent.name in FORBIDDEN_NAMES}
    assert names == set()


def test_sources_are_ascii() -> None:
    assert [name_of(path) for path in SOURCES if not path.read_bytes().isascii()] == []


def test_imports_are_absolute() -> None:
    relative = {
        name_of(path): sorted(name for name in imported_modules(path) if name.startswith("."))
        for path in PYTHON
    }
    assert {name: found for name, found in relative.items() if found} == {}


@pytest.mark.parametrize("package", ["stages", "lib", "kernels"])
def test_package_files_hold_a_docstring_and_import_nothing(package: str) -> None:
    for path in (ROOT / package).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)
        assert all(isinstance(node, ast.Expr | ast.Assign) for node in body), name_of(path)


def test_folders_of_code_are_packages() -> None:
    folders = {path.parent for path in PYTHON if path.parts[len(ROOT.parts)] in ("lib", "stages")}
    assert {
        name_of(folder) for folder in folders if not (folder / "__init__.py").is_file()
    } == set()


def test_stages_are_named_verb_noun() -> None:
    names = [path.stem for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__"]
    one_word = {"pretrain", "evaluate"}
    assert [name for name in names if "_" not in name and name not in one_word] == []
    assert [name for name in names if name in sys.stdlib_module_names] == []


def test_tests_mirror_the_code() -> None:
    mirrored = {path.name for path in (ROOT / "lib").iterdir() if path.is_dir()}
    mirrored |= {"gpu", "kernels", "layouts", "stages", "workflow"}
    folders = {
        path.relative_to(ROOT / "tests").parts[0] for path in PYTHON if "tests" in path.parts
    }
    assert {name for name in folders if not name.endswith(".py")} - mirrored == set()


def test_kernels_is_safe_beside_transformers() -> None:
    """Transformers probes for a package named kernels; ours must look harmless and stay alone."""
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    assigned = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    assert [ast.unparse(target) for target in assigned] == ["__version__"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("kernels")
    wanted = (ROOT / "requirements.in").read_text() + (ROOT / "requirements.lock").read_text()
    assert not re.search(r"^kernels\b", wanted, re.MULTILINE | re.IGNORECASE)


def test_transformers_is_imported_by_tests_and_measuring_only() -> None:
    importing = {
        name_of(path)
        for path in PYTHON
        if any(name.split(".")[0] == "transformers" for name in imported_modules(path))
    }
    others = {name for name in importing if not name.startswith("tests/")}
    assert others == {"lib/workflow/huggingface_model.py"}


def test_texts_name_no_machine() -> None:
    """Paths of one person's machine mean nothing to the next reader."""
    path_of_a_machine = re.compile(r"(?<![\w.$}])/(?:home|root|work|Users|mnt)/\w|\.\./shared\b")
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if path_of_a_machine.search(line)
    ]
    assert found == []


def test_who_imports_whom() -> None:
    """The contracts of pyproject.toml, by import-linter."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
