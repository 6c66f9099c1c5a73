"""The helper that runs tests on several ranks reports whatever goes wrong there."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import tests.train.test_pretrain
from tests.conftest import starts_ranks
from tests.distributed import run_on_ranks


def sum_of_ranks(factor):
    value = torch.tensor([float(dist.get_rank() * factor)])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item(), os.getpid()


def raise_on_rank(rank):
    if dist.get_rank() == rank:
        raise RuntimeError("the reason of the failure")
    dist.barrier()


def die_on_rank(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def test_results_come_by_rank_and_processes_are_used_again():
    first = run_on_ranks(2, sum_of_ranks, 10)
    again = run_on_ranks(2, sum_of_ranks, 1)
    assert [result[:3] for result in first] == [(0, 2, 10.0), (1, 2, 10.0)]
    assert [result[3] for result in first] == [result[3] for result in again]
    wider = run_on_ranks(4, sum_of_ranks, 1)
    assert [result[:3] for result in wider] == [(rank, 4, 6.0) for rank in range(4)]
    assert [result[3] for result in wider[:2]] == [result[3] for result in first]


def test_a_failure_comes_with_the_ranks_traceback():
    with pytest.raises(AssertionError, match="rank 1 of 2 raised") as caught:
        run_on_ranks(2, raise_on_rank, 1)
    assert "the reason of the failure" in str(caught.value)
    assert "in raise_on_rank" in str(caught.value)
    assert run_on_ranks(2, sum_of_ranks, 1)[0][2] == 1.0  # the next test is not harmed


def test_a_death_is_named():
    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code -9"):
        run_on_ranks(2, die_on_rank, 1)


def test_a_hang_ends_and_says_where():
    run_on_ranks(2, sum_of_ranks, 1)  # started by now, so that the second is not spent on starting
    with pytest.raises(AssertionError, match="rank 0 of 2 did not finish within 1 s") as caught:
        run_on_ranks(2, hang_on_rank, 0, timeout=1)
    assert "in hang_on_rank" in str(caught.value)


def test_all_tests_with_ranks_are_in_one_worker(request):
    """pytest-xdist tells by the end of the name where a test may run, and says nothing if not."""
    if "PYTEST_XDIST_WORKER" in os.environ and request.config.getoption("loadgroup"):
        assert request.node.nodeid.endswith("@ranks")
    assert starts_ranks(tests.train.test_pretrain, set())
