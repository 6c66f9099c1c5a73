"""Starts the training workers under torchrun, and speaks for all of them.

``stages/pretrain.py`` shows the call: the stage is started twice, first as the launcher and then,
by torchrun, as each worker, which lives inside ``lib.train.worker.worker_session``.

Who stops whom:

    make -> DVC -> launcher (this process) -> torchrun -> workers
      every arrow: when the left one dies, however it dies, the kernel tells the right one
      launcher on SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2: SIGUSR1 to the workers
      torchrun on SIGTERM, and on the launcher's death: the same (``lib.train.agent``)
      worker on any of the five, and on torchrun's death: all save and leave with 0

With several nodes there is a launcher on each (``lib.train.meeting``, ``lib.train.peers``): a stop
on one is a stop on all, and where the workers fail on one, all end and say which one it was.

The workers get ``launch.stop_timeout_s`` to save. The launcher becomes the parent of workers that
lose torchrun, so none can be left behind while it lives.

Exit status: 0 finished, 1 failed, 128 + signal number when stopped by one (129 SIGHUP, 130 SIGINT,
138 SIGUSR1, 140 SIGUSR2, 143 SIGTERM; also 143 where the signal came to another node or process).
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
from lib.errors import UserError
from lib.train.agent import SIGNALS_OPTION, hold_back_signals
from lib.train.captured_stderr import CapturedStderr
from lib.train.hardware import choose_threads
from lib.train.meeting import MeetingOver, Met, is_loopback, meet
from lib.train.memory_crash import explain_memory_error, memory_error
from lib.train.nodes import ONE_NODE, Nodes
from lib.train.peers import Kind, Peers, Verdict
from lib.train.signals import WARNING, StopFlag
from lib.train.worker import (
    BEGUN,
    CRASH,
    DEVICE_VARIABLE,
    LAUNCH_DIR_VARIABLE,
    STOPPED,
    USER_ERROR,
)

TORCHRUN = "torch.distributed.run"
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
_NOTHING_REPORTED = (
    "the workers ended before they could save (not started yet, a second Ctrl-C, or out of "
    "launch.stop_timeout_s); the newest checkpoint stands"
)
# Once a worker has reported a crash, its peers only wait for it: torchrun would give them 30 s.
_GRACE_AFTER_CRASH_S = 5.0
# What an error says that a worker raises because another one is gone: gloo's, NCCL's, the store's.
_OVER_A_PEER = re.compile(
    r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|Timed out waiting|"
    r"DistBackendError|DistNetworkError|DistStoreError|NCCL"
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How to start the workers.

    Attributes:
        device: ``cpu`` or ``cuda``.
        processes: number of workers on this node.
        threads: CPU threads of each worker; None shares out the cores. (torchrun would set 1, at
            which a laptop trains at a fraction of its speed.)
        stop_timeout_s: seconds that workers get to save once a stop is asked for.
        log_dir: folder for the captured standard error, kept there when a run fails.
        nodes: the machines that train together, and which of them this is.
        meeting_timeout_s: seconds to wait for the launchers of the others.
        explainer: module and arguments of the program that says what filled the memory of a worker
            which died of it; empty for none.
    """

    device: str
    processes: int
    threads: int | None
    stop_timeout_s: float
    log_dir: Path
    nodes: Nodes = ONE_NODE
    meeting_timeout_s: float = 600.0
    explainer: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Ending:
    """How a run ended: its exit status and, for each rank that reported one, the last words."""

    status: int
    # Kind of report -> (rank, text), the earliest of a kind. Of crashes the earliest for want of
    # memory, if there is one: the others were left alone by it.
    reports: dict[str, tuple[int, str]]


def launch(module: str, arguments: Sequence[str], options: LaunchOptions) -> int:
    """Runs ``python -m module arguments...`` in every worker until all have left.

    To be called in the main thread of a process that does nothing else: it installs signal
    handlers and adopts orphaned descendants.

    Returns:
        The exit status for this process; whatever a person must know has been said by then.
    """
    insisted: list[int] = []
    stop = StopFlag(on_second=insisted.append)
    die_with_parent(WARNING)
    _adopt_orphans()
    try:
        met = meet(
            options.nodes, options.processes, options.meeting_timeout_s, lambda: stop.requested
        )
    except UserError as error:
        fail(str(error))
        return 1
    except MeetingOver as over:
        return _say_stopped(over.verdict, stop)
    with contextlib.closing(met):
        return _run(_torchrun(module, arguments, options, met), options, met.peers, stop, insisted)


def _run(
    torchrun: Sequence[str],
    options: LaunchOptions,
    peers: Peers,
    stop: StopFlag,
    insisted: list[int],
) -> int:
    options.log_dir.mkdir(parents=True, exist_ok=True)
    name = f"{options.nodes.rank}-{os.getpid()}" if options.nodes.count > 1 else f"{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="drydock-launch-") as folder:
        reports = Path(folder)
        agent = _start(torchrun, options, reports)
        stderr = CapturedStderr(agent.stderr, options.log_dir / f"launch.{name}.stderr")
        try:
            _Supervisor(agent, peers, reports, options.stop_timeout_s).watch(stop, insisted)
        finally:
            _end(agent)
        stderr.finish()
        ending = _Ending(agent.returncode, _read_reports(reports))
    verdict = peers.settle(_judge(ending, stop, peers, stderr.text()))
    status = _speak(verdict, stop, stderr)
    if verdict.kind is Kind.FAILED and CRASH in ending.reports:
        rank, report = ending.reports[CRASH]
        processes = options.nodes.count * options.processes
        for line in explain_memory_error(options.explainer, rank, processes, report):
            sys.stderr.write(f"  {line}\n")
    return status


def _torchrun(module: str, arguments: Sequence[str], options: LaunchOptions, met: Met) -> list[str]:
    """The command line of torchrun.

    One node: --standalone takes a free port of its own; the address is given because torchrun
    would look up this machine's name, which fails or takes long where no resolver knows it.

    Several: the static rendezvous, where the number of a node decides its ranks. The other kind
    (c10d) numbers the nodes as they come, so that rank 0, which writes the log and the results,
    would be now here, now there; and it waits for nodes to come back, which we do not want.
    """
    command = [sys.executable, "-m", "lib.train.agent", TORCHRUN, *SIGNALS_OPTION]
    nodes = options.nodes
    if nodes.rendezvous is None:
        command += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        host = nodes.rendezvous[0]
        command += ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
        command += ["--master-addr", f"[{host}]" if ":" in host else host]
        command += ["--master-port", str(met.store_port)]
    return [*command, "--nproc-per-node", str(options.processes), "--module", module, *arguments]


def _start(
    torchrun: Sequence[str], options: LaunchOptions, reports: Path
) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        LAUNCH_DIR_VARIABLE: str(reports),
        DEVICE_VARIABLE: options.device,
        "OMP_NUM_THREADS": str(choose_threads(options.threads, options.processes)),
    }
    if options.nodes.rendezvous is not None and is_loopback(options.nodes.rendezvous[0]):
        # All nodes are this machine, yet gloo would go by its name, which may not be an address.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    launcher = os.getpid()

    def die_with_launcher() -> None:
        hold_back_signals()
        die_with_parent()
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)

    return subprocess.Popen(
        torchrun,
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches the launcher only
        preexec_fn=die_with_launcher,  # safe: no thread runs yet
    )


def _adopt_orphans() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Supervisor:
    """Waits for torchrun and all workers; passes a stop on, and enforces limits."""

    def __init__(
        self, agent: "subprocess.Popen[bytes]", peers: Peers, reports: Path, stop_timeout_s: float
    ) -> None:
        self._agent, self._peers, self._reports = agent, peers, reports
        self._stop_timeout_s = stop_timeout_s
        self._asked: set[int] = set()
        self._in_grace = False
        self._deadline = float("inf")

    def watch(self, stop: StopFlag, insisted: list[int]) -> None:
        """Returns when all are gone, or those that are left must be ended."""
        while self._agent.poll() is None or _orphans():
            self._peers.poll()
            if stop.requested:
                self._peers.tell("stop")
                self._ask_workers_to_stop("")
            elif (why := self._peers.why_stop()) is not None:
                self._ask_workers_to_stop(f"{why}: ")
            self._limit_after_failures()
            if insisted or time.monotonic() > self._deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _limit_after_failures(self) -> None:
        grace = time.monotonic() + _GRACE_AFTER_CRASH_S
        if _has_failed(self._reports):
            self._peers.tell("failing")
            if self._deadline == float("inf"):
                self._deadline = grace
        # torchrun would wait 300 s for a node that has left without its workers being done.
        left_waiting = self._peers.missing() and not _workers(self._agent)
        if (self._peers.hopeless() or left_waiting) and not self._in_grace:
            self._in_grace = True
            self._deadline = min(self._deadline, grace)

    def _ask_workers_to_stop(self, why: str) -> None:
        """Asks each worker once, also those that are only now being started."""
        if not any(self._reports.glob(f"{BEGUN}.*")):
            self._deadline = 0.0  # no worker has begun, so there is nothing to save
            return
        if not self._asked:
            self._deadline = min(self._deadline, time.monotonic() + self._stop_timeout_s)
        is_first = not self._asked
        for worker in _workers(self._agent):
            if worker.pid not in self._asked:
                self._asked.add(worker.pid)
                _signal(worker, WARNING)
        if is_first and self._asked:
            insist = "" if why else " (Ctrl-C again: stop at once)"
            with contextlib.suppress(OSError):  # after a SIGHUP there is no terminal to write to
                warn(f"{why}saving the state for up to {self._stop_timeout_s:g} s{insist}")


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
        if rank.isdigit() and kind != BEGUN:
            report = int(rank), path.read_text()
            first = found.setdefault(kind, report)
            if kind == CRASH and memory_error(report[1]) and not memory_error(first[1]):
                found[kind] = report
    return found


def _judge(ending: _Ending, stop: StopFlag, peers: Peers, stderr: str) -> Verdict:
    """How the run ended here, as far as this node can tell. The first report decides."""
    first = next(iter(ending.reports), None)
    if first == USER_ERROR:
        return Verdict(Kind.USER_ERROR, ending.reports[USER_ERROR][1])
    if first == CRASH:
        rank, text = ending.reports[CRASH]
        memory = memory_error(text)
        cause = f"rank {rank} failed: {memory or text.strip().splitlines()[-1]}"
        killed = None if memory else _killed_worker(stderr)
        over_a_peer = not memory and bool(_OVER_A_PEER.search(text))
        return _failure(killed, cause, over_a_peer=over_a_peer)
    if STOPPED in ending.reports:
        return Verdict(Kind.STOPPED, ending.reports[STOPPED][1])
    if ending.status == 0:  # also when a stop came too late to stop anything
        return Verdict(Kind.FINISHED, "")
    if stop.signal is not None or peers.stop is not None:
        return Verdict(Kind.ABANDONED, _NOTHING_REPORTED)
    cause = f"torchrun ended with status {ending.status}"
    over_a_peer = peers.missing() or peers.hopeless()
    return _failure(_killed_worker(stderr), cause, over_a_peer=over_a_peer)


def _failure(killed: str | None, cause: str, *, over_a_peer: bool) -> Verdict:
    # NCCL's watchdog ends a worker by SIGABRT when another one is gone.
    at_fault_here = killed is not None and "SIGABRT" not in killed
    kind = Kind.DRAGGED if over_a_peer and not at_fault_here else Kind.FAILED
    return Verdict(kind, killed or cause)


def _speak(verdict: Verdict, stop: StopFlag, stderr: CapturedStderr) -> int:
    """Says how the run ended and gives the exit status."""
    if verdict.kind is Kind.FAILED:
        _show_failure(stderr, verdict.text)
        return 1
    stderr.discard()
    if verdict.kind is Kind.FINISHED:
        return 0
    if verdict.kind in (Kind.STOPPED, Kind.ABANDONED):
        return _say_stopped(verdict, stop)
    fail(verdict.text)
    return 1


def _say_stopped(verdict: Verdict, stop: StopFlag) -> int:
    with contextlib.suppress(OSError):
        say(f"stopped: {verdict.text}; run the same command again to continue")
    return 128 + (stop.signal or signal.SIGTERM)


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
