"""Saving while training goes on: what is saved, who waits for whom, and what a failure costs."""

import errno
import os
import threading
from collections import namedtuple

import psutil
import pytest
import torch

from lib.checkpoint import background, loading
from lib.checkpoint import directory as folders
from lib.checkpoint.background import HostCopies, Saver
from lib.checkpoint.retention import Retention
from lib.errors import UserError
from tests.checkpoint import rank_work
from tests.checkpoint.saved import assert_is, example, load, snapshot
from tests.distributed import run_on_ranks


@pytest.fixture
def gate(monkeypatch):
    """Holds saver threads back, but not the main thread, until it is opened."""
    opened, write = threading.Event(), background.write_checkpoint

    def wait_and_write(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(60)
        return write(*arguments)

    monkeypatch.setattr(background, "write_checkpoint", wait_and_write)
    yield opened
    opened.set()


def saver_in(folder, keep_last=9, *, behind=True):
    return Saver(folder, Retention(keep_last), background=behind)


def start(saver, iteration):
    saver.start(iteration, example(iteration), {"n": iteration})


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_saved_is_the_state_at_the_call(tmp_path, gate, capsys):
    saver, tensors = saver_in(tmp_path), example(1)
    saver.start(1, tensors, {"n": 1})
    for tensor in tensors.values():
        tensor.zero_()
    assert not list(tmp_path.iterdir())
    gate.set()
    saver.finish()
    assert load(tmp_path) == 1
    assert f"saved iteration 1 to {tmp_path / 'iter_0000001'}" in capsys.readouterr().out


def test_copies_are_made_into_the_same_memory_each_time():
    copies = HostCopies()
    first = copies.take(example(1))
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    second = copies.take(example(2))
    assert_is(second, 2)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    bytes_of_all = sum(each.numel() * each.element_size() for each in second.values())
    assert copies.bytes_needed(example(1)) == bytes_of_all


def test_the_next_save_waits_for_the_one_before_and_says_so(tmp_path, gate, capsys, monkeypatch):
    monkeypatch.setattr(background, "_SECONDS_OF_SILENCE", 0.01)
    saver = saver_in(tmp_path)
    start(saver, 1)
    threading.Timer(0.2, gate.set).start()
    start(saver, 2)
    assert "waiting until the checkpoint is saved" in capsys.readouterr().out
    saver.finish()
    assert folders.iterations(tmp_path) == [1, 2]
    assert load(tmp_path) == 2


def test_a_save_that_is_waited_for_is_done_on_return(tmp_path):
    saver_in(tmp_path).save(1, example(1), {"n": 1})
    assert load(tmp_path) == 1


def test_a_save_that_is_not_in_the_background_is_done_on_return(tmp_path, gate):
    start(saver_in(tmp_path, behind=False), 1)
    assert load(tmp_path) == 1


def test_without_memory_for_copies_training_waits_and_is_told_once(
    tmp_path, gate, monkeypatch, capsys
):
    memory = namedtuple("memory", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(100))
    saver = saver_in(tmp_path)
    for iteration in (1, 2):
        start(saver, iteration)
        assert load(tmp_path) == iteration
    assert capsys.readouterr().err.count("no memory for runtime.background_save") == 1


def test_b44_a_full_disk_in_the_background_is_told_at_once_and_raised_later(
    tmp_path, monkeypatch, capsys
):
    saver = saver_in(tmp_path, keep_last=1)
    start(saver, 1)
    saver.finish()
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_manifest", full)
        start(saver, 2)
        saver.wait()
    assert saver.failed
    assert "saving iteration 2 failed; the run ends with this step" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"No space left on device.*bytes needed.*free"):
        saver.finish()
    assert not saver.failed
    assert snapshot(tmp_path) == before, "not even the one that the new one was to replace is gone"
    start(saver, 2)
    saver.finish()
    assert folders.iterations(tmp_path) == [2]


def test_a_failed_save_is_raised_by_the_next_one(tmp_path, monkeypatch):
    saver = saver_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "publish", full)
        start(saver, 1)
        saver.wait()
    with pytest.raises(UserError, match="could not be saved"):
        start(saver, 2)
    assert not folders.iterations(tmp_path)


def test_two_ranks_train_on_while_the_state_of_before_is_written(tmp_path):
    """Sharded and replicated, against the same run without a save; then a write fails on rank 1."""
    first, second = run_on_ranks(2, rank_work.background, tmp_path)
    for rank in (first, second):
        assert rank["losses"] == rank["losses_alone"]
        for kind in ("sharded", "replicated"):
            for name, tensor in rank[kind, "at save"].items():
                assert torch.equal(rank[kind, "loaded"][name], tensor), name
        assert "No space left on device (rank 1)" in rank["complaint"]
        assert rank["left"] == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    assert first["complaint"] == second["complaint"]
    assert second["failed"]


def test_copies_of_the_model_write_each_byte_once(tmp_path):
    """Two data-parallel ranks, however they share the state, fill the files of one."""
    for rank in run_on_ranks(2, rank_work.bytes_of_two_copies, tmp_path, timeout=120):
        assert len(rank) == 4
        for name, (written, payload, pieces, names) in rank.items():
            assert (pieces == names) == (name == "replicated")
            assert payload <= written < payload + 2048 * pieces, name


@pytest.mark.layouts  # it costs the other tests their ranks
def test_a_rank_that_dies_while_saving_leaves_debris_and_nobody_waiting(tmp_path, capsys):
    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code -9") as death:
        run_on_ranks(2, rank_work.die_while_saving, tmp_path)
    assert "rank 0 of 2 raised" in str(death.value), "rather than wait"
    assert folders.iterations(tmp_path) == [1]
    assert loading.find_latest(tmp_path).iteration == 1
    assert "removed from" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.partial"))
