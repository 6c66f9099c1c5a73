"""Which checkpoints stay: only those known to be whole count, and each is read once a run."""

import errno
import os

import pytest

from lib.checkpoint import directory as folders
from lib.checkpoint import retention as rules
from lib.checkpoint.directory import Damaged
from lib.checkpoint.retention import Retention
from tests.checkpoint.saved import load, save


class Record(list):
    """A list that can be given an attribute."""


@pytest.fixture
def looked_at(monkeypatch):
    """The iterations verified, in turn; those in ``.damaged`` are found damaged."""

    record = Record()
    record.damaged = set()

    def verify(folder, _group):
        record.append(int(folder.name[5:]))
        if record[-1] in record.damaged:
            raise Damaged("spoilt")

    monkeypatch.setattr(rules, "verify", verify)
    return record


def make(directory, *iterations):
    for iteration in iterations:
        folders.iteration_path(directory, iteration).mkdir()


def test_the_last_and_every_mth_stay(tmp_path, looked_at):
    make(tmp_path, *range(10, 110, 10))
    assert Retention(2, 40).apply(tmp_path, 100) == [10, 20, 30, 50, 60, 70]
    assert folders.iterations(tmp_path) == [40, 80, 90, 100]
    assert not list(tmp_path.glob("*.partial"))
    assert looked_at == [90], "the new one is known, and 40 and 80 push nobody out"


def test_each_is_looked_at_once_a_run_and_only_when_one_is_to_go(tmp_path, looked_at):
    make(tmp_path, 1, 2, 3)
    rule = Retention(3)
    rule.trust(2)  # the run was resumed from it
    assert rule.apply(tmp_path, 3) == []
    assert looked_at == []
    make(tmp_path, 4)
    assert rule.apply(tmp_path, 4) == [1]
    make(tmp_path, 5)
    assert rule.apply(tmp_path, 5) == [2]
    assert looked_at == []
    assert Retention(2).apply(tmp_path, 5) == [3]
    assert looked_at == [4], "another run"


def test_a_damaged_one_is_named_and_an_older_one_stays_for_it(tmp_path, looked_at, capsys):
    make(tmp_path, 1, 2, 3, 4)
    looked_at.damaged = {3}
    rule = Retention(2)
    assert rule.apply(tmp_path, 4) == [1]
    assert folders.iterations(tmp_path) == [2, 3, 4]
    warning = capsys.readouterr().err
    assert "iter_0000003 is damaged and does not count as kept: spoilt" in warning
    make(tmp_path, 5)
    assert rule.apply(tmp_path, 5) == [2, 3], "it goes when it would go anyway"
    assert capsys.readouterr().err == ""


def test_with_nothing_whole_but_the_new_one_nothing_goes(tmp_path, looked_at):
    make(tmp_path, 1, 2, 3)
    looked_at.damaged = {1, 2}
    assert Retention(2).apply(tmp_path, 3) == []
    assert folders.iterations(tmp_path) == [1, 2, 3]


def test_one_that_cannot_be_read_does_not_count(tmp_path, monkeypatch, capsys):
    def verify(folder, _group):
        if folder.name == "iter_0000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    make(tmp_path, 1, 2, 3)
    monkeypatch.setattr(rules, "verify", verify)
    assert Retention(2).apply(tmp_path, 3) == []
    assert "Input/output error" in capsys.readouterr().err


def test_a_damaged_one_that_is_saved_again_counts(tmp_path, looked_at):
    make(tmp_path, 1, 2, 3)
    looked_at.damaged = {2}
    rule = Retention(2)
    assert rule.apply(tmp_path, 3) == []
    rule.trust(2)
    assert rule.apply(tmp_path, 3) == [1]


def test_later_ones_stay(tmp_path, looked_at):
    make(tmp_path, 100, 200, 500)
    assert Retention(1).apply(tmp_path, 200) == [100]
    assert folders.iterations(tmp_path) == [200, 500]


def test_a_flipped_bit_in_a_kept_one_is_found_before_an_older_one_goes(tmp_path, capsys):
    save(tmp_path, 1, 2)
    data = tmp_path / "iter_0000002" / "__0_0.distcp"
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)
    save(tmp_path, 3, keep_last=2)
    assert folders.iterations(tmp_path) == [1, 2, 3]
    assert "another sha256" in capsys.readouterr().err
    (tmp_path / "iter_0000003" / "manifest.json").unlink()
    assert load(tmp_path) == 1
