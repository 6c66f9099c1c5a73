"""The stop flag: echoes of one order are one order, a later one is a second; warnings are none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.train import signals
from lib.train.signals import STOP_SIGNALS, StopFlag

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_signal_sets_the_flag(number: int) -> None:
    stop = StopFlag()
    assert (stop.requested, stop.signal) == (False, None)
    os.kill(os.getpid(), number)
    assert (stop.requested, stop.signal) == (True, number)


def test_echoes_within_two_seconds_are_the_same_order() -> None:
    second: list[int] = []
    stop = StopFlag(on_second=second.append)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert (stop.signal, second) == (signal.SIGUSR1, [])


def test_second_interrupt_always_counts() -> None:
    second: list[int] = []
    StopFlag(on_second=second.append)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert second == [signal.SIGINT]


def test_later_order_is_a_second_one_and_a_warning_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What our own processes pass on, or Slurm before its SIGTERM, never cuts a save."""
    now = time.monotonic()
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    second: list[int] = []
    stop = StopFlag(on_second=second.append)
    for number in (
        signal.SIGUSR1,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGHUP,
        signal.SIGTERM,
    ):
        os.kill(os.getpid(), number)
        now += signals.ECHO_SECONDS + 0.1
    assert (stop.signal, second) == (signal.SIGUSR1, [signal.SIGHUP, signal.SIGTERM])


def test_second_wish_ends_a_worker_by_the_signal_itself() -> None:
    code = (
        "import os, signal, time\n"
        "from lib.train.signals import StopFlag\n"
        "stop = StopFlag()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert stop.requested\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=20, check=False)
    assert done.returncode == -signal.SIGINT


def test_a_closed_terminal_stops_nothing_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as a Slurm script does for DVC
    stop = StopFlag()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.signal is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.signal == signal.SIGUSR1


def test_signal_that_was_held_back_is_heard_by_the_flag() -> None:
    """As for a worker that torchrun has only just started."""
    code = (
        "import os, signal\n"
        "from lib.train.signals import STOP_SIGNALS, StopFlag\n"
        "for number in STOP_SIGNALS:\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)\n"
        "    os.kill(os.getpid(), number)\n"
        "    assert StopFlag().signal == number\n"
        "    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
