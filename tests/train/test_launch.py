"""The launcher with a toy stage: what it says, what it returns, and that nobody trains on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until
from tests.train.toy import Toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Toy]]:
    """Starts toys; kills what a failed test leaves behind."""
    toys: list[Toy] = []

    def start_toy(*arguments: str, **environment: str) -> Toy:
        toys.append(Toy(tmp_path, list(arguments), environment))
        return toys[-1]

    yield start_toy
    for toy in toys:
        toy.end()


def test_success_is_silent_but_for_the_workers_own_lines(start: Callable[..., Toy]) -> None:
    toy = start("warn", "2", "-", "5")
    status, out, err = toy.finish()
    assert status == 0
    assert out.splitlines() == ["hello from the worker"] * 2
    assert err.splitlines() == ["warning: the schedule is longer than the training"] * 2
    assert not list((toy.folder / "logs").iterdir())


def test_users_error_is_one_line_without_a_traceback(start: Callable[..., Toy]) -> None:
    toy = start("user_error", "2", "-", "5")
    status, out, err = toy.finish()
    assert status == 1
    assert out == ""
    assert err == "error: data/tokens: the index is missing; run tokenize_corpus\n"


def test_crash_shows_everything_and_names_the_rank(start: Callable[..., Toy]) -> None:
    toy = start("crash", "2", "-", "5")
    status, _, err = toy.finish()
    assert status == 1
    assert "a line that libraries write" in err
    assert 'raise ZeroDivisionError("one over nothing")' in err
    assert err.splitlines()[-1].startswith("error: rank 1 failed: ZeroDivisionError: one over")
    (log,) = (toy.folder / "logs").iterdir()
    assert log.read_text() in err


def test_worker_killed_from_outside_is_named(start: Callable[..., Toy]) -> None:
    toy = start("lose_a_peer", "2", "-", "5")
    status, _, err = toy.finish()
    assert status == 1
    assert "connection closed by peer" in err
    assert err.splitlines()[-1].startswith("error: rank 1 was ended by SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_signal_saves_on_every_rank(start: Callable[..., Toy], number: int) -> None:
    toy = start("train", "2", "-", "20")
    toy.wait_for_training(2)
    toy.process.send_signal(number)
    status, out, err = toy.finish()
    assert status == 128 + number
    assert toy.saved_by() == {".0": signal.SIGUSR1, ".1": signal.SIGUSR1}
    assert out == "stopped: saved iteration 7; run the same command again to continue\n"
    assert "Traceback" not in err
    assert toy.nobody_left()


def test_second_interrupt_ends_at_once(start: Callable[..., Toy]) -> None:
    toy = start("stuck", "1", "-", "60")
    toy.wait_for_training(1)
    begin = time.monotonic()
    toy.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    toy.process.send_signal(signal.SIGINT)
    status, out, _ = toy.finish()
    assert (status, time.monotonic() - begin < 5) == (130, True)
    assert "the newest checkpoint stands" in out
    assert toy.nobody_left()


def test_workers_that_do_not_stop_in_time_are_ended(start: Callable[..., Toy]) -> None:
    toy = start("stuck", "2", "-", "1")
    toy.wait_for_training(2)
    toy.process.terminate()
    status, _, _ = toy.finish()
    assert status == 143
    assert toy.nobody_left()


def test_stop_before_any_worker_exists(start: Callable[..., Toy]) -> None:
    toy = start("train", "2", "-", "60")
    wait_until(lambda: bool(psutil.Process(toy.process.pid).children()))
    begin = time.monotonic()
    toy.process.terminate()
    status, _, _ = toy.finish()
    assert (status, time.monotonic() - begin < 10) == (143, True)
    assert not list(toy.folder.glob("training.*"))


def test_killed_launcher_takes_everyone_with_it(start: Callable[..., Toy]) -> None:
    toy = start("train", "2", "-", "20")
    toy.wait_for_training(2)
    toy.process.kill()
    wait_until(toy.nobody_left)
    assert toy.saved_by() == {".0": signal.SIGTERM, ".1": signal.SIGTERM}


def test_killed_torchrun_takes_the_workers_with_it(start: Callable[..., Toy]) -> None:
    toy = start("train", "2", "-", "20")
    toy.wait_for_training(2)
    toy.agent().kill()
    status, out, _ = toy.finish()
    assert status == 143
    assert out.startswith("stopped: saved iteration 7")
    assert toy.saved_by() == {".0": signal.SIGTERM, ".1": signal.SIGTERM}
    assert toy.nobody_left()


@pytest.mark.parametrize("target", ["torchrun", "worker"])
def test_terminated_below_the_launcher_still_saves(start: Callable[..., Toy], target: str) -> None:
    toy = start("train", "1", "-", "20")
    (worker,) = toy.wait_for_training(1)
    (toy.agent() if target == "torchrun" else worker).terminate()
    status, out, err = toy.finish()
    assert status == 143
    assert out.startswith("stopped: saved iteration 7")
    assert "Traceback" not in err
    assert toy.nobody_left()


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [("3", {}, "3"), ("-", {"OMP_NUM_THREADS": "5"}, "5"), ("-", {"OMP_NUM_THREADS": ""}, None)],
)
def test_threads_of_a_worker(
    start: Callable[..., Toy], asked: str, environment: dict[str, str], expected: str | None
) -> None:
    toy = start("environment", "1", asked, "5", **environment)
    assert toy.finish()[0] == 0
    told = json.loads((toy.folder / "environment.0").read_text())
    assert told["threads"] == expected or str(len(os.sched_getaffinity(0)))
    assert told["device"] == "cpu"


def test_two_launches_at_once_do_not_share_a_port(start: Callable[..., Toy]) -> None:
    first, second = start("done", "1", "-", "5"), start("done", "1", "-", "5")
    assert [first.finish()[0], second.finish()[0]] == [0, 0]


def test_launcher_never_imports_torch() -> None:
    code = "import sys, lib.train.launch, stages.pretrain; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
