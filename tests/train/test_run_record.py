"""The record: what git says in each state of a project, and what of the environment is told."""

import subprocess
from pathlib import Path

import pytest

from lib.train import run_record
from lib.train.run_record import git_state


def git(project: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org"]
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "code.py").write_text("one = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_clean_commit(project: Path) -> None:
    assert git_state(project) == {
        "commit": git(project, "rev-parse", "HEAD"),
        "dirty": False,
        "changes": [],
        "diff": "",
        "diff_is_whole": True,
    }


def test_changes_are_told(project: Path) -> None:
    (project / "code.py").write_text("one = 2\n")
    (project / "new.py").touch()
    state = git_state(project)
    assert state is not None
    assert state["dirty"] is True
    assert state["changes"] == [" M code.py", "?? new.py"]
    assert "-one = 1\n+one = 2\n" in str(state["diff"])


def test_long_diff_is_cut_and_says_so(project: Path) -> None:
    (project / "code.py").write_text("x\n" * 200_000)
    state = git_state(project)
    assert state is not None
    assert state["diff_is_whole"] is False
    assert len(str(state["diff"])) == 100_000


def test_no_git(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_folder_inside_anothers_repository(project: Path) -> None:
    unpacked = project / "unpacked"
    unpacked.mkdir()
    assert git_state(unpacked) is None


def test_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None


def test_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told = run_record._told_environment()
    assert told["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "secret" not in told.values()
