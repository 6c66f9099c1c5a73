"""One process trains one configuration: two holders exclude each other, a dead one frees."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lib.checkpoint.lock import lock
from lib.errors import UserError

HOLD = """
import sys, time, pathlib
from lib.checkpoint.lock import lock
with lock(pathlib.Path(sys.argv[1]), 0):
    sys.stdout.write("held\\n"); sys.stdout.flush()
    time.sleep(float(sys.argv[2]))
"""


def hold(directory, seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_process_is_told_who_holds_it(tmp_path, capsys):
    process = hold(tmp_path / "state", 60)
    try:
        started = time.monotonic()
        with pytest.raises(UserError) as refusal, lock(tmp_path / "state", 0.5):
            pass
        assert 0.4 < time.monotonic() - started < 10
        assert "another process is training this configuration" in str(refusal.value)
        assert f"process {process.pid}" in str(refusal.value)
        waiting = capsys.readouterr().out
        assert waiting.count("\n") == 1
        assert f"process {process.pid}" in waiting
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_holder_frees_it_at_once(tmp_path, how):
    process = hold(tmp_path, 60)
    os.kill(process.pid, how)
    process.wait()
    process.stdout.close()
    with lock(tmp_path, 0):
        assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()


def test_waiting_ends_when_the_holder_does(tmp_path):
    process = hold(tmp_path, 0.6)
    with lock(tmp_path, 20):
        pass
    process.wait()
    process.stdout.close()


def test_a_waiter_whose_state_is_removed_meanwhile_locks_the_new_one(tmp_path):
    directory = tmp_path / "state"
    with lock(directory, 0):
        waiter = subprocess.Popen(
            [sys.executable, "-c", HOLD.replace("1]), 0)", "1]), 20)"), str(directory), "60"],
            stdout=subprocess.PIPE,
        )
        assert b"waiting" in waiter.stdout.readline()
        shutil.rmtree(directory)
    try:
        assert waiter.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {waiter.pid} "), lock(directory, 0):
            pass
    finally:
        waiter.kill()
        waiter.wait()
        waiter.stdout.close()


def test_it_is_released_after_use_and_after_errors(tmp_path):
    with pytest.raises(RuntimeError), lock(tmp_path, 0):
        raise RuntimeError
    with lock(tmp_path, 0), pytest.raises(UserError), lock(tmp_path, 0):
        pass
    with lock(tmp_path, 0):
        pass


def test_children_do_not_inherit_it(tmp_path):
    with lock(tmp_path, 0):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with lock(tmp_path, 0):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be opened"), lock(tmp_path / "file", 0):
        pass
