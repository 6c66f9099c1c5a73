"""Every stage declares all code that it reaches: on the real workflow, and with planted gaps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib.errors import UserError
from lib.workflow.import_closure import check_workflow, import_closure

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "stages/__init__.py": "",
    "stages/train.py": "import lib.deep.engine\n",
    "lib/__init__.py": "",
    "lib/deep/__init__.py": "",
    "lib/deep/engine.py": "def run():\n    from lib.deep import parts\n    import torch\n",
    "lib/deep/parts.py": "from lib.errors import UserError\n",
    "lib/deep/other.py": "",
    "lib/errors.py": "class UserError(Exception): pass\n",
}
ALL_DEPS = ["stages/__init__.py", "stages/train.py", "lib/__init__.py", "lib/deep", "lib/errors.py"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    for name, text in TINY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def problems(tiny: Path, deps: list[str]) -> list[str]:
    lines = ["stages:", "  train:", "    cmd: x", "    deps:", *(f"      - {dep}" for dep in deps)]
    (tiny / "dvc.yaml").write_text("\n".join(lines) + "\n")
    return check_workflow(tiny / "dvc.yaml")


def test_real_workflow_is_whole() -> None:
    assert check_workflow(ROOT / "dvc.yaml") == []


def test_real_workflow_misses_any_dep_that_is_taken_away(tmp_path: Path) -> None:
    """Takes away each code dependency of each stage in turn."""
    for package in ("stages", "lib", "kernels"):
        shutil.copytree(ROOT / package, tmp_path / package)
    lines = (ROOT / "dvc.yaml").read_text().splitlines()
    numbers = [
        number
        for number, line in enumerate(lines)
        if line.lstrip().startswith(("- stages/", "- lib/", "- kernels"))
    ]
    assert len(numbers) > 100
    unnoticed = []
    for number in numbers[::7]:  # each takes a while
        shorter = lines[:number] + lines[number + 1 :]
        (tmp_path / "dvc.yaml").write_text("\n".join(shorter))
        if not any("which no dep covers" in line for line in check_workflow(tmp_path / "dvc.yaml")):
            unnoticed.append(lines[number])
    assert unnoticed == []


def test_closure_follows_packages_and_imports_inside_functions(tiny: Path) -> None:
    names = {str(path.relative_to(tiny)) for path in import_closure(tiny, "stages.train")}
    assert names == set(TINY) - {"lib/deep/other.py"}


def test_whole_declaration_has_no_problem(tiny: Path) -> None:
    assert problems(tiny, ALL_DEPS) == []


@pytest.mark.parametrize(
    ("missing", "files"),
    [
        ("lib/__init__.py", ["lib/__init__.py"]),
        ("lib/errors.py", ["lib/errors.py"]),
        ("lib/deep", ["lib/deep/__init__.py", "lib/deep/engine.py", "lib/deep/parts.py"]),
    ],
)
def test_gap_names_stage_and_file(tiny: Path, missing: str, files: list[str]) -> None:
    deps = [dep for dep in ALL_DEPS if dep != missing]
    assert problems(tiny, deps) == [f"train: imports {file}, which no dep covers" for file in files]


def test_dep_that_is_gone_or_unused_is_named(tiny: Path) -> None:
    assert problems(tiny, [*ALL_DEPS, "lib/gone.py", "lib/deep/other.py"]) == [
        "train: depends on lib/gone.py: it does not exist",
        "train: depends on lib/deep/other.py: never imported",
    ]


def check(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stages.check_workflow", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_without_a_workflow_is_one_line(tmp_path: Path) -> None:
    done = check(tmp_path, "--workflow", "nope.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nope.yaml: no such file")
    assert done.stderr.count("\n") == 1


def test_stage_without_a_module_is_one_line_beside_the_others(tiny: Path) -> None:
    assert problems(tiny, ALL_DEPS[:-1]) == ["train: imports lib/errors.py, which no dep covers"]
    with (tiny / "dvc.yaml").open("a") as workflow:
        workflow.write("  own_step:\n    cmd: echo done\n")
    done = check(tiny)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "train: imports lib/errors.py, which no dep covers",
        "own_step: has no module: stages/own_step.py does not exist",
    ]


def test_file_that_is_no_python_is_named(tiny: Path) -> None:
    (tiny / "lib" / "deep" / "parts.py").write_text("def broken(:\n")
    with pytest.raises(UserError, match=r"lib/deep/parts\.py: not valid Python"):
        problems(tiny, ALL_DEPS)
