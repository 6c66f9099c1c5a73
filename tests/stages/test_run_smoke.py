"""A smoke run that finds something wrong: one message that says what it means and what to try."""

import shutil
from pathlib import Path

import pytest

from lib.errors import UserError
from lib.hardware import layouts
from lib.train.comparison import Difference
from lib.workflow.torture import Account
from stages import run_smoke

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def test_a_layout_that_hangs_is_told(project, monkeypatch, capsys):
    def hang(*_arguments):
        raise AssertionError("train_on_rank failed:\nrank 1 of 2 did not finish within 300 s")

    monkeypatch.setattr(layouts, "compare_layouts", hang)
    with pytest.raises(
        UserError, match=r"rank 1 of 2 did not finish within 300 s.*; try: "
    ) as told:
        run_smoke._compare(project, 2, "cpu")
    assert "\n" not in str(told.value)
    assert "train_on_rank failed" in capsys.readouterr().out


def test_a_layout_that_differs_is_told(project, monkeypatch, capsys):
    asked = []

    def compared(_params, processes, device):
        asked.append((processes, device))
        yield "tp2 pp1 dp1", Difference(1e-3, 0.0, (0.0, "a"), (0.0, "a"))
        yield "tp1 pp2 dp1", Difference(1e-12, 0.0, (0.0, "a"), (0.0, "a"))

    monkeypatch.setattr(layouts, "compare_layouts", compared)
    with pytest.raises(UserError, match=r"^tp2 pp1 dp1: .*try python -m stages\.check_hardware"):
        run_smoke._compare(project, 16, "cuda")
    assert asked == [(8, "cuda")], "more than 8 processes show nothing new"
    assert "DIFFERS" in capsys.readouterr().out


def test_a_resume_that_goes_wrong_is_told(project, monkeypatch):
    account = Account(faults=["step 7: loss is 5.1, was 5.0"], kept=Path("somewhere"))
    monkeypatch.setattr(run_smoke, "kill_once", lambda *_folders: account)
    with pytest.raises(UserError, match=r"step 7: loss is 5\.1.*kept in somewhere"):
        run_smoke._kill(project, project)
    monkeypatch.setattr(run_smoke, "kill_once", lambda *_folders: Account())
    run_smoke._kill(project, project)
