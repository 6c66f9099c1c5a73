"""The launcher with a toy stage: what it says, what it returns, and that nobody trains on."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lib.train import signals
from tests.processes import family_of, wait_until
from tests.train.toy import Toy

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"TOY_TORCHRUN": "1"}  # where torchrun itself plays no part


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


def test_success_is_silent_and_two_runs_at_once_share_no_port(start: Callable[..., Toy]) -> None:
    """Also beside a program that holds torchrun's usual port."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 29500)):
        speaking, other = start("warn", "2", "-", "5"), start("environment", "1", "-", "5")
        status, out, err = speaking.finish()
        assert status == 0
        assert out.splitlines() == ["hello from the worker"] * 2
        assert err.splitlines() == ["warning: the schedule is longer than the training"] * 2
        assert other.finish() == (0, "", "")
        assert not list((speaking.folder / "logs").iterdir())
        told = json.loads((other.folder / "environment.0").read_text())
        assert told == {
            "device": "cpu",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "GROUP_RANK": "0",
        } | {"threads": os.environ["OMP_NUM_THREADS"]}


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


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_stop_signal_saves_on_every_rank(start: Callable[..., Toy], number: int) -> None:
    """Also on one that is only being started when the signal comes."""
    toy = start("train", "2", "-", "20", **QUICK, TOY_LATE_RANKS="1")
    toy.wait_for_training(1)
    toy.process.send_signal(number)
    status, out, err = toy.finish()
    assert status == 128 + number
    assert toy.saved_by() == {".0": signal.SIGUSR1, ".1": signal.SIGUSR1}
    assert out == "stopped: saved iteration 7; run the same command again to continue\n"
    assert err.splitlines() == [
        "warning: saving the state for up to 20 s (Ctrl-C again: stop at once)"
    ]
    assert toy.nobody_left()


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.layouts),
        ("everyone", signal.SIGTERM),
        pytest.param("everyone", signal.SIGUSR1, marks=pytest.mark.layouts),
    ],
)
def test_long_save_is_not_cut(start: Callable[..., Toy], whom: str, number: int) -> None:
    """torchrun would kill what is left 1 second after a signal here (30 by default), and die of
    SIGUSR1 (what Slurm sends to everyone). The echoes come later than the two seconds."""
    slow = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "TOY_SAVE_SECONDS": "3"}
    toy = start("train", "2", "-", "20", **slow)
    workers = toy.wait_for_training(2)
    begin = time.monotonic()
    for process in [toy.agent()] if whom == "torchrun" else toy.family:
        process.send_signal(number)
    if whom == "everyone":  # one of our own is late
        time.sleep(max(0.0, begin + signals.ECHO_SECONDS + 0.2 - time.monotonic()))
        with contextlib.suppress(psutil.NoSuchProcess):
            workers[0].send_signal(signals.WARNING)
    status, out, err = toy.finish()
    assert status == 128 + (number if whom == "everyone" else signal.SIGTERM)
    assert out == "stopped: saved iteration 7; run the same command again to continue\n"
    assert "Traceback" not in err
    assert set(toy.saved_by()) == {".0", ".1"}
    assert toy.nobody_left()


def test_stop_within_the_last_step_finds_the_run_finished(start: Callable[..., Toy]) -> None:
    toy = start("last_step", "1", "-", "20", **QUICK)
    toy.wait_for_training(1)
    toy.process.terminate()
    status, out, _ = toy.finish()
    assert (status, out) == (0, "")


def test_second_interrupt_ends_at_once(start: Callable[..., Toy]) -> None:
    toy = start("stuck", "1", "-", "60", **QUICK)
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
    toy = start("stuck", "2", "-", "1", **QUICK)
    toy.wait_for_training(2)
    toy.process.terminate()
    status, _, _ = toy.finish()
    assert status == 143
    assert toy.nobody_left()


@pytest.mark.parametrize("environment", [{}, {"TOY_TORCHRUN": "1", "TOY_LATE_RANKS": "0 1"}])
def test_stop_before_any_worker_has_begun(
    start: Callable[..., Toy], environment: dict[str, str]
) -> None:
    """Before torchrun starts them, and before they listen: all end at once."""
    toy = start("train", "2", "-", "60", **environment)
    launcher = psutil.Process(toy.process.pid)
    wait_until(lambda: len(launcher.children(recursive=True)) >= (3 if environment else 1))
    toy.family = family_of(toy.process.pid)
    toy.process.terminate()
    status, _, err = toy.finish()
    assert (status, err) == (143, "")
    assert not list(toy.folder.glob("training.*"))
    assert toy.nobody_left()


def test_killed_launcher_takes_everyone_with_it(start: Callable[..., Toy]) -> None:
    """And the next run may start at once, beside those that still save."""
    toy = start("train", "2", "-", "20", TOY_SAVE_SECONDS="3")
    toy.wait_for_training(2)
    toy.process.kill()
    toy.process.wait()
    assert start("done", "1", "-", "5").finish() == (0, "", "")
    wait_until(toy.nobody_left)
    assert toy.saved_by() == {".0": signal.SIGUSR1, ".1": signal.SIGUSR1}


def test_killed_torchrun_takes_the_workers_with_it(start: Callable[..., Toy]) -> None:
    toy = start("train", "2", "-", "20", **QUICK)
    toy.wait_for_training(2)
    toy.agent().kill()
    status, out, _ = toy.finish()
    assert status == 143
    assert out.startswith("stopped: saved iteration 7")
    assert toy.saved_by() == {".0": signal.SIGUSR1, ".1": signal.SIGUSR1}
    assert toy.nobody_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_to_a_worker_still_saves(start: Callable[..., Toy], number: int) -> None:
    """That all ranks agree when one is told, ``test_signals.py`` shows in the training loop."""
    toy = start("train", "1", "-", "20", **QUICK)
    (worker,) = toy.wait_for_training(1)
    worker.send_signal(number)
    status, out, err = toy.finish()
    assert (status, err) == (143, "")
    assert out.startswith("stopped: saved iteration 7")
    assert toy.saved_by() == {".0": number}
    assert toy.nobody_left()


@pytest.mark.parametrize(("asked", "expected"), [("3", "3"), ("-", None)])
def test_threads_of_a_worker(start: Callable[..., Toy], asked: str, expected: str | None) -> None:
    toy = start("environment", "1", asked, "5", **QUICK, OMP_NUM_THREADS="")
    assert toy.finish()[0] == 0
    told = json.loads((toy.folder / "environment.0").read_text())
    assert told["threads"] == (expected or str(len(os.sched_getaffinity(0))))


def test_launcher_never_imports_torch() -> None:
    code = "import sys, lib.train.launch, stages.pretrain; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
