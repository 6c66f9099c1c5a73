"""Checkpoints of several ranks: sharded state, another number of ranks, faults on one of them."""

import torch

from lib.checkpoint.as_model import read_parameters
from tests.checkpoint import rank_work
from tests.distributed import run_on_ranks


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-5, msg=name)


def test_two_ranks_save_and_both_two_and_one_resume(tmp_path):
    (losses, end), (_, other_end) = run_on_ranks(2, rank_work.train_and_save, tmp_path)
    assert_same(end, other_end)
    assert len(end) == 9

    (resumed, resumed_end), _ = run_on_ranks(2, rank_work.resume_and_train, tmp_path)
    assert resumed == losses[3:], "the same layout resumes bit for bit"
    assert_same(resumed_end, end)

    ((alone, alone_end),) = run_on_ranks(1, rank_work.resume_and_train, tmp_path)
    assert len(alone) == 2
    assert_close(alone_end, end)


def test_one_rank_saves_and_two_resume(tmp_path):
    ((_, end),) = run_on_ranks(1, rank_work.train_and_save, tmp_path)
    (_, resumed_end), _ = run_on_ranks(2, rank_work.resume_and_train, tmp_path)
    assert_close(resumed_end, end)


def test_each_rank_gets_its_own_random_stream(tmp_path):
    first, second = run_on_ranks(2, rank_work.random_streams, tmp_path)
    assert not torch.equal(first, second)


def test_stages_of_a_pipeline_save_and_load_what_each_holds(tmp_path):
    """The names and the size of all are the same on all; what nobody fills is refused."""
    first, second = run_on_ranks(2, rank_work.stages, tmp_path)
    assert first["needed"] == second["needed"]
    both = run_on_ranks(1, rank_work.needed_for_both_stages)[0]
    payload = sum(tensor.numel() * 4 for tensor in rank_work.both_stages().values())
    assert payload < both <= first["needed"] < payload + 200_000
    for rank in (first, second):
        assert all(torch.equal(a, b) for a, b in rank["loaded"])
        assert "model.1.weight has no place in this model" in rank["refused"]
        assert "model.0" not in rank["refused"]
    (alone,) = run_on_ranks(1, rank_work.load_both_stages, tmp_path)
    assert_same(alone, rank_work.both_stages())
    whole = read_parameters(
        tmp_path / "stages" / "iter_0000001",
        {"0.weight": (5, 3), "1.weight": (4, 3)},
    )
    assert_same({f"model.{name}": value for name, value in whole.items()}, rank_work.both_stages())


def test_faults_of_one_rank_are_everyones(tmp_path):
    first, second = run_on_ranks(2, rank_work.faults, tmp_path)
    assert first == second
    fallback, unreadable, full, left, ill = first
    assert fallback == 1
    assert "no checkpoint in" in unreadable
    assert "No space left on device (rank 1)" in full
    assert left == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert "plain has shape (6,) instead of (7,)" in ill
