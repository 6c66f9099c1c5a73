"""Starts the training workers under torchrun, and speaks for all of them.

``stages/pretrain.py`` shows the call: the stage is started twice, first as the launcher and then,
by torchrun, as each worker, which lives inside ``lib.train.worker.worker_session``.

Who stops whom:

    make -> DVC -> launcher (this process) -> torchrun -> workers
      every arrow: when the left one dies, however it dies, the kernel sends the right one SIGTERM
      launcher on SIGTERM, SIGINT, SIGHUP: SIGUSR1 to the workers, which save and leave with 0
      worker on SIGTERM (torchrun died or was told to stop): the same

torchrun gives its workers 30 seconds after a SIGTERM, which can be in the middle of a save; hence
SIGUSR1, which does not pass through it, and a time limit that is a parameter. The launcher
becomes the parent of workers that lose torchrun, so none can be left behind while it lives.

Exit status: 0 finished, 1 failed, 128 + signal number when stopped by one (130, 143).
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lib.cli import die_with_parent
from lib.console import fail, say, warn
from lib.train.captured_stderr import CapturedStderr
from lib.train.hardware import choose_threads
from lib.train.signals import LAUNCHER_STOP_SIGNALS, StopFlag
from lib.train.worker import CRASH, DEVICE_VARIABLE, LAUNCH_DIR_VARIABLE, STOPPED, USER_ERROR

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
_NOTHING_REPORTED = (
    "the workers ended before they could save (not started yet, a second Ctrl-C, or out of "
    "launch.stop_timeout_s); the newest checkpoint stands"
)
# Once a worker has reported a crash, its peers only wait for it: torchrun would give them 30 s.
_GRACE_AFTER_CRASH_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How to start the workers.

    Attributes:
        device: ``cpu`` or ``cuda``.
        processes: number of workers.
        threads: CPU threads of each worker; None shares out the cores. (torchrun would set 1, at
            which a laptop trains at a fraction of its speed.)
        stop_timeout_s: seconds that workers get to save once a stop is asked for.
        log_dir: folder for the captured standard error, kept there when a run fails.
    """

    device: str
    processes: int
    threads: int | None
    stop_timeout_s: float
    log_dir: Path


@dataclass(frozen=True)
class _Ending:
    """How a run ended: its exit status and, for each rank that reported one, the last words."""

    status: int
    reports: dict[str, tuple[int, str]]  # kind of report -> (rank, text), the earliest of a kind


def launch(module: str, arguments: Sequence[str], options: LaunchOptions) -> int:
    """Runs ``python -m module arguments...`` in every worker until all have left.

    To be called in the main thread of a process that does nothing else: it installs signal
    handlers and adopts orphaned descendants.

    Returns:
        The exit status for this process; whatever a person must know has been said by then.
    """
    die_with_parent()
    insisted: list[int] = []
    stop = StopFlag(LAUNCHER_STOP_SIGNALS, on_second=insisted.append)
    _adopt_orphans()
    options.log_dir.mkdir(parents=True, exist_ok=True)
    log = options.log_dir / f"launch.{os.getpid()}.stderr"
    with tempfile.TemporaryDirectory(prefix="drydock-launch-") as folder:
        reports = Path(folder)
        agent = _start(module, arguments, options, reports)
        stderr = CapturedStderr(agent.stderr, log)
        try:
            _supervise(agent, stop, insisted, reports, options.stop_timeout_s)
        finally:
            _end(agent)
        stderr.finish()
        ending = _Ending(agent.returncode, _read_reports(reports))
    return _speak(ending, stop, stderr)


def _start(
    module: str, arguments: Sequence[str], options: LaunchOptions, reports: Path
) -> "subprocess.Popen[bytes]":
    # --standalone takes a free port of its own; the address is given because torchrun would look
    # up this machine's name, which fails or takes long where no resolver knows it.
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    workers = ["--nproc-per-node", str(options.processes), "--module", module, *arguments]
    environment = os.environ | {
        LAUNCH_DIR_VARIABLE: str(reports),
        DEVICE_VARIABLE: options.device,
        "OMP_NUM_THREADS": str(choose_threads(options.threads, options.processes)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(options.stop_timeout_s)),
    }
    launcher = os.getpid()

    def die_with_launcher() -> None:
        die_with_parent()
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)

    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, *workers],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches the launcher only
        preexec_fn=die_with_launcher,  # safe: no thread runs yet
    )


def _adopt_orphans() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _supervise(
    agent: "subprocess.Popen[bytes]",
    stop: StopFlag,
    insisted: list[int],
    reports: Path,
    stop_timeout_s: float,
) -> None:
    """Waits until torchrun and all workers are gone; passes a stop on, and enforces limits."""
    asked = False
    deadline = float("inf")
    while agent.poll() is None or _orphans():
        now = time.monotonic()
        if stop.requested and not asked:
            asked = True
            deadline = min(deadline, now + stop_timeout_s)
            _ask_workers_to_stop(agent, stop_timeout_s)
        if deadline == float("inf") and _has_failed(reports):
            deadline = now + _GRACE_AFTER_CRASH_S
        if insisted or now > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _ask_workers_to_stop(agent: "subprocess.Popen[bytes]", stop_timeout_s: float) -> None:
    workers = _workers(agent)
    if not workers:  # torchrun has not started any: there is nothing to save
        agent.terminate()
        return
    for worker in workers:
        _signal(worker, signal.SIGUSR1)
    with contextlib.suppress(OSError):  # after a SIGHUP there is no terminal to write to
        warn(f"saving the state for up to {stop_timeout_s:g} s (Ctrl-C again: stop at once)")


def _workers(agent: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    if agent.poll() is not None:
        return _orphans()
    try:
        return psutil.Process(agent.pid).children()
    except psutil.NoSuchProcess:
        return _orphans()


def _orphans() -> list[psutil.Process]:
    """Workers that lost torchrun and became children of this process; the dead are reaped."""
    _gone, alive = psutil.wait_procs(psutil.Process().children(), timeout=0)
    return alive


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _end(agent: "subprocess.Popen[bytes]") -> None:
    """Kills whatever is left, workers first, and waits for it."""
    family = psutil.Process().children(recursive=True)
    for process in reversed(family):
        _signal(process, signal.SIGKILL)
    agent.wait()
    psutil.wait_procs([process for process in family if process.pid != agent.pid], timeout=10)


def _has_failed(reports: Path) -> bool:
    return any(report.name.startswith((USER_ERROR, CRASH)) for report in reports.iterdir())


def _read_reports(folder: Path) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    by_time = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in by_time:
        kind, _, rank = path.name.partition(".")
        if rank.isdigit():
            found.setdefault(kind, (int(rank), path.read_text()))
    return found


def _speak(ending: _Ending, stop: StopFlag, stderr: CapturedStderr) -> int:
    """Says how the run ended and gives the exit status. The first report decides."""
    first = next(iter(ending.reports), None)
    if first == USER_ERROR:
        stderr.discard()
        fail(ending.reports[USER_ERROR][1])
        return 1
    if first == CRASH:
        rank, text = ending.reports[CRASH]
        cause = f"rank {rank} failed: {text.strip().splitlines()[-1]}"
        _show_failure(stderr, _killed_worker(stderr.text()) or cause)
        return 1
    if stop.signal is not None or STOPPED in ending.reports:
        stderr.discard()
        _, saved = ending.reports.get(STOPPED, (0, _NOTHING_REPORTED))
        with contextlib.suppress(OSError):
            say(f"stopped: {saved}; run the same command again to continue")
        return 128 + (stop.signal or signal.SIGTERM)
    if ending.status == 0:
        stderr.discard()
        return 0
    cause = f"torchrun ended with status {ending.status}"
    _show_failure(stderr, _killed_worker(stderr.text()) or cause)
    return 1


def _show_failure(stderr: CapturedStderr, cause: str) -> None:
    sys.stderr.write(stderr.text())
    fail(f"{cause} (all of standard error is above and in {stderr.log})")


def _killed_worker(text: str) -> str | None:
    """Names a worker that something killed, by torchrun's closing report: it left none itself.

    Its peers fail too, and do report, but only that they lost it.
    """
    root = text.partition("Root Cause")[2]
    rank = re.search(r"rank\s*:\s*(\d+)", root)
    code = re.search(r"exitcode\s*:\s*-(\d+)", root)
    if rank is None or code is None:
        return None
    name = signal.Signals(int(code.group(1))).name
    hint = ": out of memory? the kernel's log (dmesg) tells" if name == "SIGKILL" else ""
    return f"rank {rank.group(1)} was ended by {name}{hint}"
