"""Processes that die at the worst moment: while they write a result."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from lib.data.processes import ProcessPool
from lib.errors import UserError
from tests.data.children import started_processes


def square(number):
    return number * number, os.getpid()


def large(_number):
    return np.zeros(1 << 24, dtype=np.int64)


def die(number):
    os.kill(os.getpid(), number)


def refuse(text):
    raise UserError(text)


def fail(_item):
    raise RuntimeError("a fault of ours")


def test_results_belong_to_their_items():
    with ProcessPool(square, 2) as pool:
        results = [future.result() for future in [pool.submit(n) for n in range(50)]]
    assert [value for value, _ in results] == [n * n for n in range(50)]
    assert os.getpid() not in {pid for _, pid in results}
    assert started_processes() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_has_its_cause(number):
    with (
        pytest.raises(UserError, match=f"killed by {number.name}"),
        ProcessPool(die, 2) as pool,
    ):
        pool.submit(number).result()
    assert started_processes() == []


def test_an_error_of_the_user_passes_through():
    with pytest.raises(UserError, match=r"^the file is wrong$"), ProcessPool(refuse, 1) as pool:
        pool.submit("the file is wrong").result()


def test_a_fault_of_ours_ends_the_process():
    with pytest.raises(UserError, match="ended with status 1"), ProcessPool(fail, 1) as pool:
        pool.submit(0).result()


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_killed_while_writing_a_result(delay):
    """A 128 MB result takes long to write: at some of these moments the kill cuts it."""

    def kill():
        time.sleep(delay)
        for child in started_processes():
            child.kill()

    def run():
        with ProcessPool(large, 1) as pool:
            pool.submit(0).result()
            killer = threading.Thread(target=kill)
            killer.start()
            while True:
                pool.submit(0).result(timeout=60)

    with pytest.raises(UserError, match="killed by SIGKILL"):
        run()


def test_leaving_with_an_error_kills_what_still_works():
    def leave():
        with ProcessPool(time.sleep, 2) as pool:
            for _ in range(4):
                pool.submit(600)
            time.sleep(0.5)
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert time.monotonic() - started < 60
    assert started_processes() == []
