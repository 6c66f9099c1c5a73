"""The stop flag: echoes of one wish are one wish, a later signal is a second one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.train import signals
from lib.train.signals import StopFlag

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_first_signal_sets_the_flag(number: int) -> None:
    stop = StopFlag(NUMBERS)
    assert (stop.requested, stop.signal) == (False, None)
    os.kill(os.getpid(), number)
    assert (stop.requested, stop.signal) == (True, number)


def test_echoes_within_two_seconds_are_the_same_wish() -> None:
    second: list[int] = []
    stop = StopFlag(NUMBERS, on_second=second.append)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert (stop.signal, second) == (signal.SIGUSR1, [])


def test_second_interrupt_always_counts() -> None:
    second: list[int] = []
    StopFlag(NUMBERS, on_second=second.append)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert second == [signal.SIGINT]


def test_later_signal_is_a_second_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    second: list[int] = []
    StopFlag(NUMBERS, on_second=second.append)
    os.kill(os.getpid(), signal.SIGTERM)
    later = time.monotonic() + signals.ECHO_SECONDS + 0.1
    monkeypatch.setattr(signals.time, "monotonic", lambda: later)
    os.kill(os.getpid(), signal.SIGTERM)
    assert second == [signal.SIGTERM]


def test_second_wish_ends_a_worker_by_the_signal_itself() -> None:
    code = (
        "import os, signal, time\n"
        "from lib.train.signals import WORKER_STOP_SIGNALS, StopFlag\n"
        "stop = StopFlag(WORKER_STOP_SIGNALS)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert stop.requested\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=20, check=False)
    assert done.returncode == -signal.SIGINT
