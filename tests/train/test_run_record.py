"""The record: what git says in each state of a project, and what of the environment is told."""

import json
import subprocess
from pathlib import Path

import pytest

from lib.checkpoint.resume import StateRecord
from lib.train import run_record
from lib.train.run_record import begin_record, finish_record, git_state
from tests.checkpoint.examples import run_config


def git(project: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org"]
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "lib").mkdir()
    (folder / "lib" / "code.py").write_text("one = 1\n")
    (folder / "params.yaml").write_text("model: {}  # mine\n")
    (folder / "dvc.lock").write_text("schema: '2.0'\n")
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
    (project / "lib" / "code.py").write_text("one = 2\n")
    (project / "lib" / "new.py").touch()
    state = git_state(project)
    assert state is not None
    assert state["dirty"] is True
    assert state["changes"] == [" M lib/code.py", "?? lib/new.py"]
    assert "-one = 1\n+one = 2\n" in str(state["diff"])


def test_products_of_the_pipeline_are_no_changes(project: Path) -> None:
    (project / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    (project / "results").mkdir()
    (project / "results" / "train.csv").touch()
    (project / ".dvc").mkdir()
    (project / ".dvc" / "config").touch()
    state = git_state(project)
    assert state is not None
    assert (state["dirty"], state["changes"], state["diff"]) == (False, [], "")


def test_parameters_of_the_run_are_changes(project: Path) -> None:
    (project / "params.yaml").write_text("model: {}\n")
    state = git_state(project)
    assert state is not None
    assert state["changes"] == [" M params.yaml"]


def test_what_changes_during_a_run_is_recorded_as_it_began(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    commit = git(project, "rev-parse", "HEAD")
    begun = begin_record(Path("params.yaml"), run_config())
    before = json.dumps(begun)
    (project / "params.yaml").write_text("model: {changed: true}\n")
    (project / "lib" / "code.py").write_text("one = 2\n")
    git(project, "commit", "-qam", "second")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    adopted: list[dict[str, object]] = [{"from": "a", "to": "b", "iteration": 3}]
    state = StateRecord("ff", {}, "code-2", adopted=adopted, layout={"data": 2})
    record = finish_record(begun, state)
    assert json.dumps(begun) == before
    assert record["params"] == "model: {}  # mine\n"
    assert record["git"] == {
        "commit": commit,
        "dirty": False,
        "changes": [],
        "diff": "",
        "diff_is_whole": True,
    }
    assert begun["environment"] == record["environment"]
    assert dict(record["environment"])["OMP_NUM_THREADS"] == "3"
    assert (record["code_sha256"], record["adopted"]) == ("code-2", adopted)
    assert record["layout"] == {"data": 2}
    assert str(record["started"]) <= str(record["ended"])
    fields = "format command started ended fingerprint layout code_sha256 adopted began_from data"
    fields += " environment python packages machine git params"
    assert set(record) == set(fields.split())


def test_long_diff_is_cut_and_says_so(project: Path) -> None:
    (project / "lib" / "code.py").write_text("x\n" * 200_000)
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
