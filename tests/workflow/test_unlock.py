"""A lock that a killed DVC left is removed; one that a living DVC holds is not."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def working_dvc(project: Path) -> Iterator[int]:
    """A process that looks like `python .../bin/dvc repro` at work in the project."""
    fake = project / "dvc"
    fake.write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(fake), "repro"], cwd=project)
    time.sleep(0.2)
    yield process.pid
    process.kill()
    process.wait()


def unlock(project: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stages.unlock_workflow"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def write_lock(project: Path, text: str) -> Path:
    lock = project / ".dvc" / "tmp" / "rwlock"
    lock.write_text(text)
    return lock


def owned_by(pid: int) -> str:
    return json.dumps({"read": {}, "write": {"model": {"pid": pid, "cmd": "dvc repro"}}})


def test_nothing_to_unlock(project: Path) -> None:
    done = unlock(project)
    assert (done.returncode, "nothing to unlock" in done.stdout) == (0, True)


@pytest.mark.parametrize("text", ["", '{"read": {"da', owned_by(2**22 - 1), owned_by(1)])
def test_dead_lock_is_removed(project: Path, text: str) -> None:
    """Empty, cut off, of a dead process, and of a number that another process has by now."""
    lock = write_lock(project, text)
    done = unlock(project)
    assert (done.returncode, lock.exists()) == (0, False), done.stderr


@pytest.mark.parametrize("text", ["", None])
def test_live_lock_stays(project: Path, working_dvc: int, text: str | None) -> None:
    lock = write_lock(project, owned_by(working_dvc) if text is None else text)
    done = unlock(project)
    assert (done.returncode, lock.exists()) == (1, True)
    assert f"process {working_dvc}" in done.stderr


def test_dvc_of_another_project_does_not_matter(
    project: Path, working_dvc: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / ".dvc" / "tmp").mkdir(parents=True)
    lock = write_lock(other, "")
    assert (unlock(other).returncode, lock.exists()) == (0, False)
