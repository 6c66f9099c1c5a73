"""Cleaning takes what nothing needs; work, the present state and states in use stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.checkpoint.lock import lock
from lib.checkpoint.resume import ResumePolicy, StateDirectory, open_state
from tests.checkpoint.examples import run_config, two_phases

ROOT = Path(__file__).resolve().parents[2]
POLICY = ResumePolicy(on_code_change="fresh")
DEAD = 2**22 + 1  # beyond the highest process number that Linux gives


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path


def state(root: Path, lr: float, *, finished: bool, code: str = "code-1") -> StateDirectory:
    opened = open_state(root, run_config(optimizer__lr=lr), code, POLICY)
    opened.mark_training({"data": 1})
    checkpoint = opened.path / "iter_0000007"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "__0_0.distcp").write_bytes(bytes(1000))
    (opened.path / "latest_checkpointed_iteration.txt").write_text("7\n")
    if finished:
        opened.mark_finished()
    return opened


def make_present(project: Path, lr: float) -> None:
    (project / "outputs").mkdir()
    text = run_config(optimizer__lr=lr).to_json()
    (project / "outputs" / "run_config.json").write_text(text)


def clean(
    project: Path, *arguments: str, status: int = 0, **variables: str
) -> "subprocess.CompletedProcess[str]":
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DRYDOCK_STATE", "DVC_ROOT")
    }
    done = subprocess.run(
        [sys.executable, "-m", "stages.clean_state", *arguments],
        cwd=project,
        env=inherited | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_only_what_is_finished_or_superseded_goes(project: Path) -> None:
    root = project / "state"
    finished = state(root, 1e-3, finished=True)
    unfinished = state(root, 2e-3, finished=False)
    present = state(root, 3e-3, finished=True)
    state(root, 3e-3, finished=False, code="code-2")
    present.mark_finished()
    make_present(project, 3e-3)
    superseded = f"{present.path.name}.superseded-1"
    assert superseded in left(root)
    done = clean(project)
    assert left(root) == sorted([unfinished.path.name, present.path.name])
    assert f"removed state/{finished.path.name} (0.0 MB)" in done.stdout
    assert f"removed state/{superseded}" in done.stdout
    kept = f"kept state/{unfinished.path.name}: it is unfinished, at iteration 7"
    assert kept in done.stdout
    assert f"kept state/{present.path.name}: it is that of outputs/run_config.json" in done.stdout
    assert "--all removes these too" in done.stdout
    assert (unfinished.path / "iter_0000007" / "__0_0.distcp").is_file()


def test_where_a_run_with_a_new_phase_will_begin_stays(project: Path) -> None:
    longer = two_phases()
    before = open_state(project / "state", longer.before_phase(1), "code-1", POLICY)
    before.mark_finished()
    (project / "outputs").mkdir()
    (project / "outputs" / "run_config.json").write_text(longer.to_json())
    kept = f"kept state/{before.path.name}: it is that of outputs/run_config.json before a phase"
    assert kept in clean(project).stdout
    assert left(project / "state") == [before.path.name]


def test_all_removes_work_and_the_present_state_too(project: Path) -> None:
    root = project / "state"
    state(root, 1e-3, finished=False)
    state(root, 2e-3, finished=True)
    make_present(project, 2e-3)
    clean(project, "--all")
    assert left(root) == []
    assert "no states in state" in clean(project).stdout


@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_states_in_use_stay_with_what_they_superseded(
    project: Path, arguments: tuple[str, ...]
) -> None:
    root = project / "state"
    state(root, 1e-3, finished=True)
    held = state(root, 1e-3, finished=True, code="code-2")
    names = [held.path.name, f"{held.path.name}.superseded-1"]
    with lock(held.path, wait_s=0):
        done = clean(project, *arguments)
        assert left(root) == names
    assert done.stdout.count(f"process {os.getpid()}") == 2
    clean(project)
    assert left(root) == []


@pytest.mark.parametrize("text", [None, "", "[]", '{"format": 1}'])
def test_a_state_that_does_not_say_what_it_is_stays(project: Path, text: str | None) -> None:
    damaged = state(project / "state", 1e-3, finished=True)
    record = damaged.path / "state.json"
    if text is None:
        record.unlink()
    else:
        record.write_text(text)
    assert "does not say whether it is finished" in clean(project).stdout
    assert damaged.path.is_dir()


def test_other_folders_and_half_removed_states(project: Path) -> None:
    root = project / "state"
    gone = state(root, 1e-3, finished=False)
    gone.path.rename(gone.path.with_name(f"{gone.path.name}.partial"))
    (root / "notes").mkdir()
    (root / "results.superseded-1").mkdir()
    clean(project, "--all")
    assert left(root) == ["notes", "results.superseded-1"]


def test_logs_of_dead_launchers_go(project: Path) -> None:
    root = project / "state"
    root.mkdir()
    names = [f"launch.{DEAD}.stderr", f"launch.{os.getpid()}.stderr", "launch.mine.stderr"]
    for name in names:
        (root / name).touch()
    clean(project)
    assert left(root) == sorted(names[1:])


def test_the_folder_is_where_training_puts_it(project: Path) -> None:
    big, original = project / "big", project / "original"
    for root in (big, original / "state"):
        state(root, 1e-3, finished=True)
    clean(project, DRYDOCK_STATE=str(big), DVC_ROOT=str(original))
    assert (left(big), len(left(original / "state"))) == ([], 1)
    clean(project, DVC_ROOT=str(original))
    assert left(original / "state") == []


def test_a_damaged_run_configuration_removes_nothing(project: Path) -> None:
    kept = state(project / "state", 1e-3, finished=True)
    (project / "outputs").mkdir()
    (project / "outputs" / "run_config.json").write_text("{")
    assert clean(project, status=1).stderr.startswith("error: outputs/run_config.json: ")
    assert kept.path.is_dir()
    clean(project, "--all")
    assert left(project / "state") == []
