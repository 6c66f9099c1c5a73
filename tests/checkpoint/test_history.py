"""The rows of a run: one for each step, whatever was cut off where."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.checkpoint.history import History
from lib.errors import UserError


def row(iteration, kind="train", loss=None):
    return {"kind": kind, "iteration": iteration, "loss": 1 / iteration if loss is None else loss}


def write(directory, iterations, valid_every=4):
    history = History(directory)
    history.truncate(0)
    for iteration in iterations:
        history.append(row(iteration))
        if iteration % valid_every == 0:
            history.append(row(iteration, "valid"))
    return history


def test_rows_come_back_exactly(tmp_path):
    history = write(tmp_path, range(1, 9))
    assert history.rows("train", 99) == [row(n) for n in range(1, 9)]
    assert history.rows("valid", 99) == [row(4, "valid"), row(8, "valid")]
    assert History(tmp_path).rows("train", 99) == history.rows("train", 99)
    assert History(tmp_path / "nowhere").rows("train", 99) == []


def test_a_resume_leaves_one_row_for_each_step(tmp_path):
    write(tmp_path, range(1, 7))
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"kind": "train", "iteration": 7, "lo')
    history = History(tmp_path)
    history.truncate(4)
    for iteration in range(5, 9):
        history.append(row(iteration, loss=2.0))
    assert [each["iteration"] for each in history.rows("train", 99)] == list(range(1, 9))
    assert [each["loss"] for each in history.rows("train", 99)][4:] == [2.0] * 4
    assert history.rows("valid", 99) == [row(4, "valid")]
    text = (tmp_path / "history.jsonl").read_text()
    assert all(json.loads(line) for line in text.splitlines())


@given(length=st.integers(0, 12), cut=st.integers(0, 900), resume=st.integers(0, 12))
def test_a_file_cut_anywhere_is_mended(tmp_path_factory, length, cut, resume):
    directory = tmp_path_factory.mktemp("history")
    write(directory, range(1, length + 1))
    path = directory / "history.jsonl"
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = [json.loads(line) for line in data.split(b"\n")[:-1]]
    history = History(directory)
    history.truncate(resume)
    expected = [each for each in whole if each["iteration"] <= resume]
    for kind in ("train", "valid"):
        assert history.rows(kind, 99) == [each for each in expected if each["kind"] == kind]
    assert not list(directory.glob("*.partial"))


def test_of_two_passes_over_the_same_steps_the_later_counts(tmp_path):
    """A run made shorter keeps the rows of its later checkpoints; then it goes on."""
    history = write(tmp_path, range(1, 9))
    for iteration in (5, 6):
        history.append(row(iteration, loss=7.0))
    rows = history.rows("train", 99)
    assert [each["iteration"] for each in rows] == list(range(1, 9))
    assert [each["loss"] for each in rows[4:6]] == [7.0, 7.0]
    assert [each["iteration"] for each in history.rows("train", 5)] == [1, 2, 3, 4, 5]
    assert history.rows("valid", 7) == [row(4, "valid")]


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b'{"kind": "train"}', b"\0\0\0", b""])
def test_damage_inside_the_file_is_named(tmp_path, line):
    write(tmp_path, range(1, 4))
    path = tmp_path / "history.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"history\.jsonl:2 is damaged"):
        History(tmp_path).truncate(3)


def test_zeros_at_the_end_after_a_power_cut(tmp_path):
    write(tmp_path, range(1, 4))
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(bytes(512))
    history = History(tmp_path)
    history.truncate(3)
    assert len(history.rows("train", 99)) == 3


def test_special_floats_survive(tmp_path):
    history = History(tmp_path)
    history.truncate(0)
    history.append(row(1, loss=float("inf")))
    history.append({"kind": "train", "iteration": 2, "loss": 0.1 + 0.2, "tiny": 5e-324})
    history.sync()
    first, second = history.rows("train", 99)
    assert first["loss"] == float("inf")
    assert second["loss"] == 0.1 + 0.2
    assert second["tiny"] == 5e-324
