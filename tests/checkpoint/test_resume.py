"""What becomes of a state directory: the table of lib/checkpoint/resume.py, row by row."""

import json

import pytest

from lib.checkpoint import resume
from lib.checkpoint.fingerprint import fingerprint, fingerprint_parts
from lib.checkpoint.resume import ResumePolicy, open_state, state_path
from lib.errors import UserError
from tests.checkpoint.examples import run_config

REFUSE, ADOPT, FRESH = (ResumePolicy(on_code_change=how) for how in ("refuse", "adopt", "fresh"))


def open_(root, code="code-1", policy=REFUSE, **changes):
    return open_state(root, run_config(**changes), code, policy)


def trained(root, code="code-1", iteration=100, finished=False):
    state = open_(root, code)
    state.mark_training({"tensor": 1, "data": 2})
    (state.path / f"iter_{iteration:07d}").mkdir(exist_ok=True)
    (state.path / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    (state.path / "history.jsonl").write_text("{}\n")
    if finished:
        state.mark_finished()
    return state


def record(path):
    return json.loads((path / "state.json").read_text())


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_new_state_is_described_in_full(tmp_path):
    state = open_(tmp_path)
    assert state.outcome == "new"
    assert state.path == tmp_path / fingerprint(run_config()) == state_path(tmp_path, run_config())
    said = record(state.path)
    assert len(said.pop("sha256")) == 64
    assert said == {
        "format": 2,
        "fingerprint": state.path.name,
        "parts": fingerprint_parts(run_config()),
        "code_hash": "code-1",
        "finished": False,
        "adopted": [],
        "layout": {},
        "began_from": {},
        "fresh": False,
    }


@pytest.mark.parametrize("policy", [REFUSE, ADOPT, FRESH])
@pytest.mark.parametrize("finished", [False, True])
def test_same_code_continues(tmp_path, policy, finished):
    trained(tmp_path, finished=finished)
    state = open_(tmp_path, policy=policy)
    assert state.outcome == "continued"
    assert state.record.finished == finished
    assert state.record.layout == {"tensor": 1, "data": 2}
    assert "iter_0000100" in names(state.path)


def test_changed_code_is_refused_and_both_ways_on_are_named(tmp_path):
    before = trained(tmp_path)
    kept = names(before.path)
    with pytest.raises(UserError) as refusal:
        open_(tmp_path, "code-2")
    for text in ("on_code_change: adopt", "on_code_change: fresh", "code-1", "code-2", "100"):
        assert text in str(refusal.value)
    assert names(before.path) == kept
    assert record(before.path)["code_hash"] == "code-1"
    assert open_(tmp_path, "code-1").outcome == "continued"


def test_adopting_is_recorded_every_time(tmp_path):
    trained(tmp_path)
    state = open_(tmp_path, "code-2", ADOPT)
    assert state.outcome == "adopted"
    assert open_(tmp_path, "code-2").outcome == "continued"
    trained(tmp_path, "code-2", iteration=200)
    state = open_(tmp_path, "code-3", ADOPT)
    assert record(state.path)["adopted"] == [
        {"from": "code-1", "to": "code-2", "iteration": 100},
        {"from": "code-2", "to": "code-3", "iteration": 200},
    ]
    assert record(state.path)["code_hash"] == "code-3"
    assert "iter_0000200" in names(state.path)


@pytest.mark.parametrize(
    ("finished", "code", "policy"),
    [
        (False, "code-2", FRESH),
        (True, "code-2", REFUSE),
        (True, "code-2", ADOPT),
        (True, "code-2", FRESH),
        (False, "code-1", ResumePolicy(fresh=True)),
        (True, "code-1", ResumePolicy(fresh=True)),
        (False, "code-2", ResumePolicy(on_code_change="adopt", fresh=True)),
    ],
)
def test_starting_again_keeps_the_old_state_aside(tmp_path, capsys, finished, code, policy):
    old = trained(tmp_path, finished=finished)
    (old.path / "lock").write_text("")
    state = open_(tmp_path, code, policy)
    assert state.outcome == "restarted"
    assert names(state.path) == ["lock", "state.json"]
    assert record(state.path)["code_hash"] == code
    assert not record(state.path)["finished"]
    aside = tmp_path / f"{state.path.name}.superseded-1"
    assert names(aside) == [
        "history.jsonl",
        "iter_0000100",
        "latest_checkpointed_iteration.txt",
        "state.json",
    ]
    assert str(aside) in capsys.readouterr().out
    state.mark_finished()
    open_(tmp_path, code, ResumePolicy(fresh=True))
    assert (tmp_path / f"{state.path.name}.superseded-2").is_dir()


def test_an_interrupted_fresh_run_continues_until_it_is_finished(tmp_path):
    """launch.fresh stays in params.yaml: it must not start the run over at every attempt."""
    fresh = ResumePolicy(fresh=True)
    trained(tmp_path)
    assert open_(tmp_path, policy=fresh).outcome == "restarted"
    again = open_(tmp_path, policy=fresh)
    assert again.outcome == "continued"
    again.mark_training({})
    assert open_(tmp_path, policy=fresh).outcome == "continued"
    again.mark_finished()
    assert open_(tmp_path, policy=fresh).outcome == "restarted"


def test_a_held_lock_survives_starting_again(tmp_path):
    from lib.checkpoint.lock import lock

    path = trained(tmp_path).path
    with lock(path, 0):
        open_(tmp_path, policy=ResumePolicy(fresh=True))
        with pytest.raises(UserError, match="another process"), lock(path, 0):
            pass


def test_changed_code_before_the_first_checkpoint_costs_nothing(tmp_path):
    open_(tmp_path).mark_training({})
    assert open_(tmp_path, "code-2").outcome == "restarted"


def test_a_longer_run_of_a_finished_state_is_unfinished_again(tmp_path):
    trained(tmp_path, finished=True)
    state = open_(tmp_path, training__train_iters=40)
    assert (state.outcome, state.record.finished) == ("continued", True)
    state.mark_training({"tensor": 1, "data": 4})
    assert not record(state.path)["finished"]
    with pytest.raises(UserError, match="the code has changed"):
        open_(tmp_path, "code-2")


def test_another_configuration_has_another_state(tmp_path):
    one, two = trained(tmp_path), open_(tmp_path, optimizer__lr=2e-3)
    assert one.path != two.path
    assert two.outcome == "new"
    assert open_(tmp_path).outcome == "continued"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"format": 1}', '{"format": 9}', '{"format": 2, "x": 2}']
)
def test_a_damaged_record_is_refused(tmp_path, text):
    path = trained(tmp_path).path
    (path / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"state\.json"):
        open_(tmp_path)
    assert "iter_0000100" in names(path)


def test_an_edited_record_is_not_believed(tmp_path):
    path = trained(tmp_path).path
    edited = record(path) | {"code_hash": "code-2"}
    (path / "state.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match=r"state\.json is damaged: .*its own sha256; restore it"):
        open_(tmp_path, "code-2")


@pytest.mark.parametrize("moves", range(5))
def test_a_kill_while_the_old_state_is_put_aside(tmp_path, monkeypatch, moves):
    """However far the moving got, the next run starts again and nothing is lost."""
    path = trained(tmp_path).path
    everything = names(path)
    done = []

    def move(source, target):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(source.name)
        source.rename(target)

    monkeypatch.setattr(resume.shutil, "move", move)
    policy = ResumePolicy(fresh=True)
    if moves < len(everything):
        with pytest.raises(KeyboardInterrupt):
            open_(tmp_path, policy=policy)
    else:
        open_(tmp_path, policy=policy)
    monkeypatch.undo()
    state = open_(tmp_path, policy=policy)
    assert names(state.path) == ["state.json"]
    kept = [name for aside in tmp_path.glob("*.superseded-*") for name in names(aside)]
    assert set(everything) <= set(kept)
    assert kept.count("iter_0000100") == 1


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        open_(tmp_path / "file")
