"""A run with added phases goes on from the run without them: from where, and when not."""

import json
import shutil

import pytest

from lib.checkpoint import directory as folders
from lib.checkpoint.resume import ResumePolicy, open_state, state_path
from lib.errors import UserError
from tests.checkpoint.examples import two_phases

REFUSE, ADOPT, FRESH = (ResumePolicy(on_code_change=how) for how in ("refuse", "adopt", "fresh"))
LONGER = two_phases()  # the second phase begins with step 10
SHORTER = LONGER.before_phase(1)


def trained(root, *iterations, config=SHORTER, code="code-1"):
    """A state as the run without the phases leaves it."""
    state = open_state(root, config, code, REFUSE)
    for iteration in iterations:
        folder = folders.iteration_path(state.path, iteration)
        folder.mkdir()
        (folder / "tensors").write_text(f"of {iteration}")
    folders.write_pointer(state.path, iterations[-1])
    (state.path / "history.jsonl").write_text("rows\n")
    return state


def open_(root, policy=REFUSE, code="code-1", config=LONGER):
    return open_state(root, config, code, policy)


def record(path):
    return json.loads((path / "state.json").read_text())


def test_it_takes_over_what_both_runs_have_in_common(tmp_path, capsys):
    old = trained(tmp_path, 5, 10, 15)
    state = open_(tmp_path)
    assert (state.outcome, state.path) == ("begun", state_path(tmp_path, LONGER))
    assert folders.iterations(state.path) == [5, 10]
    assert folders.read_pointer(state.path) == 10
    assert (state.path / "iter_0000010" / "tensors").read_text() == "of 10"
    assert (state.path / "history.jsonl").read_text() == "rows\n"
    assert record(state.path)["began_from"] == {"state": old.path.name, "iteration": 10}
    assert f"{state.path} goes on from its iteration 10" in capsys.readouterr().out
    assert folders.iterations(old.path) == [5, 10, 15]
    shutil.rmtree(old.path)
    assert (state.path / "iter_0000010" / "tensors").read_text() == "of 10"
    again = open_(tmp_path)
    assert (again.outcome, again.record.began_from["iteration"]) == ("continued", 10)


def test_the_state_that_has_come_farthest_is_taken(tmp_path):
    third = LONGER.data.phases[1].model_copy(update={"from_samples": 60})
    phases = (*LONGER.data.phases, third)
    three = LONGER.model_copy(update={"data": LONGER.data.model_copy(update={"phases": phases})})
    trained(tmp_path, 5)
    state = open_(tmp_path, config=three)
    assert (state.record.began_from["state"], folders.read_pointer(state.path)) == (
        state_path(tmp_path, SHORTER).name,
        5,
    )
    shutil.rmtree(state.path)
    trained(tmp_path, 12, 15, 20, config=LONGER)  # 15 steps to the third phase
    state = open_(tmp_path, config=three)
    assert state.record.began_from == {"state": state_path(tmp_path, LONGER).name, "iteration": 15}


def test_checkpoints_after_the_phase_are_no_beginning(tmp_path, capsys):
    old = trained(tmp_path, 11, 12)
    assert open_(tmp_path).outcome == "new"
    said = capsys.readouterr().err
    assert f"{old.path} is this run without what data.phases adds from sample 40 on" in said
    assert "its first checkpoint, iteration 11, lies after iteration 10" in said


def test_a_fresh_run_begins_with_nothing(tmp_path):
    trained(tmp_path, 5)
    state = open_(tmp_path, ResumePolicy(fresh=True))
    assert (state.outcome, folders.iterations(state.path)) == ("new", [])


def test_changed_code_is_asked_for_as_in_any_unfinished_run(tmp_path):
    old = trained(tmp_path, 5)
    old.mark_finished()
    with pytest.raises(UserError, match=r"code-1 -> code-2.*to iteration 5.*on_code_change: adopt"):
        open_(tmp_path, code="code-2")
    assert open_(tmp_path, code="code-1").outcome == "begun"
    shutil.rmtree(state_path(tmp_path, LONGER))
    adopted = open_(tmp_path, ADOPT, "code-2")
    assert adopted.record.adopted == [{"from": "code-1", "to": "code-2", "iteration": 5}]
    assert record(old.path)["adopted"] == []
    shutil.rmtree(adopted.path)
    assert open_(tmp_path, FRESH, "code-2").outcome == "new"


def test_a_kill_while_it_takes_over(tmp_path, monkeypatch):
    trained(tmp_path, 5, 10)

    def killed(_directory, _iteration):
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "write_pointer", killed)
    with pytest.raises(KeyboardInterrupt):
        open_(tmp_path)
    monkeypatch.undo()
    state = open_(tmp_path)
    assert (state.outcome, folders.iterations(state.path)) == ("begun", [5, 10])


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    old = trained(tmp_path, 5)

    def refuse(_source, _target):
        raise OSError("no links here")

    monkeypatch.setattr("lib.checkpoint.added_phases.os.link", refuse)
    copied = open_(tmp_path).path / "iter_0000005" / "tensors"
    assert copied.read_text() == "of 5"
    assert not copied.samefile(old.path / "iter_0000005" / "tensors")


def test_a_state_whose_record_is_not_its_own_is_not_used(tmp_path, capsys):
    old = trained(tmp_path, 5)
    (old.path / "state.json").unlink()
    assert open_(tmp_path).outcome == "new"
    assert "state.json is missing or another state's" in capsys.readouterr().err
