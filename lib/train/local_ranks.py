"""Runs a function on N processes of this machine that form a process group.

    results = run_on_ranks(2, function, argument, ...)    # results[rank]

For checks that compare layouts, not for training: the processes start once and are used again,
since importing torch takes seconds, and each call makes a process group of its own. The function
is a module-level one that gets the arguments in every process and finds its rank by
``torch.distributed``; arguments and results are plain data and tensors. What fails on a rank is
raised here with that rank's traceback, a rank that dies is named with its exit code, and one that
hangs with the place where it stands.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# After the first failure the other ranks get so long to tell theirs: the first one to be heard
# is often only the peer of the one at fault.
_GRACE_S = 1.5
# DTensor keeps every mesh that it has seen, and so the threads of their groups, some 15 a call:
# after thirty calls eight ranks were ten times slower. Fresh ones start in a moment: all that they
# need is imported before they are forked.
_MOST_THREADS = 60
_PROJECT = Path(__file__).resolve().parents[2]
_PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "lib.train.setup",  # and what it imports: most of what a rank needs
]


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    stack_file: Path

    def num_threads(self) -> int:
        """Threads of the process; 0 if it has ended."""
        try:
            return psutil.Process(self.process.pid).num_threads()
        except psutil.NoSuchProcess:
            return 0

    def where_it_stands(self) -> str:
        """The Python stack of a rank that is alive and busy."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not self.stack_file.stat().st_size:
            time.sleep(0.02)
        return self.stack_file.read_text()


@dataclass(frozen=True)
class _Call:
    """A function by its module, file and name, since pickle knows no test modules."""

    module: str
    file: str
    name: str
    arguments: tuple[Any, ...]
    device: str


class _Pool:
    """The processes; a call that goes wrong ends them all, and the next starts fresh ones."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="test-ranks-")
        self._calls = 0
        # Forked from a process that has torch imported, but has run nothing with it.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        with contextlib.chdir(_PROJECT):  # before Python 3.13 it looks for them where it begins
            forkserver.ensure_running()

    def run(self, size: int, call: "_Call", timeout: float) -> list[Any]:
        if any(rank.num_threads() > _MOST_THREADS for rank in self._ranks):
            self.close()
        while len(self._ranks) < size:
            self._ranks.append(self._start(len(self._ranks)))
        ranks = self._ranks[:size]
        self._calls += 1
        meeting = str(Path(self._folder.name) / f"call-{self._calls}")
        for number, rank in enumerate(ranks):
            job = (number, size, meeting, timeout, call)
            with contextlib.suppress(OSError):  # a dead rank is noticed and named below
                rank.connection.send_bytes(pickle.dumps(job))
        results, failures = _collect(ranks, timeout)
        if failures:
            self.close()
            heads = [f"rank {number} of {size} {text}" for number, text in sorted(failures.items())]
            raise AssertionError(f"{call.name} failed:\n" + "\n".join(heads))
        return [results[number] for number in range(size)]

    def _start(self, number: int) -> _Rank:
        here, there = self._context.Pipe()
        stack_file = Path(self._folder.name) / f"stack-{number}-{self._calls}"
        stack_file.touch()
        process = self._context.Process(
            target=_serve, args=(there, str(stack_file)), name=f"rank-{number}", daemon=True
        )
        process.start()
        there.close()
        return _Rank(process, here, stack_file)

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []


def _collect(ranks: list[_Rank], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Waits for every rank's answer, death or the end of time."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(ranks))
    deadline = time.monotonic() + timeout
    while waiting:
        sources: dict[Any, int] = {rank.connection: n for n, rank in waiting.items()}
        sources |= {rank.process.sentinel: n for n, rank in waiting.items()}
        ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for number in {sources[source] for source in ready}:
            rank = waiting.pop(number)
            try:
                outcome, value = pickle.loads(rank.connection.recv_bytes())  # noqa: S301
            except (EOFError, OSError):
                rank.process.join()
                outcome, value = "died", f"died with exit code {rank.process.exitcode}"
            if outcome == "done":
                results[number] = value
            else:
                failures[number] = value
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for number, rank in waiting.items():
        reason = "was waiting" if failures else f"did not finish within {timeout:g} s"
        failures[number] = f"{reason}; it stands at\n{rank.where_it_stands()}"
    return results, failures


def _serve(connection: Connection, stack_file: str) -> None:
    """What a rank does all its life: take a job, do it, answer."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    modules: dict[str, ModuleType] = {}
    with open(stack_file, "w") as stack:  # noqa: PTH123
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        while True:
            try:
                job = pickle.loads(connection.recv_bytes())  # noqa: S301
            except EOFError:
                return
            try:
                answer = pickle.dumps(("done", _work(modules, *job)))
            except BaseException:
                answer = pickle.dumps(("failed", f"raised\n{traceback.format_exc()}"))
            connection.send_bytes(answer)


def _work(
    modules: dict[str, ModuleType], rank: int, size: int, meeting: str, timeout: float, call: _Call
) -> Any:  # noqa: ANN401
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    device = _gpu_of(rank, size) if call.device == "cuda" else None
    if call.file not in modules:
        modules[call.file] = _load(call.module, call.file)
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout + 60),  # the caller's own limit is the one to be heard
        device_id=device,
    )
    dist.barrier()  # a rank that were done by now would leave the others half connected
    try:
        torch.manual_seed(0)
        function: Any = modules[call.file]
        for part in call.name.split("."):
            function = getattr(function, part)
        return function(*call.arguments)
    finally:
        dist.destroy_process_group()
        # Sharded modules refer to themselves: while they live, so do their groups' threads.
        gc.collect()


def _gpu_of(rank: int, size: int) -> "torch.device":
    """This rank's GPU, made the current one: its own, or where there are too few a shared one.

    NCCL refuses two ranks on one GPU of a host, so where they share, each is told that it is a host
    of its own and sends by sockets. The GPU turns from process to process, some milliseconds for
    each collective: this shows whether numbers are right, not how fast they come.
    """
    import torch

    from lib.train.setup import set_nccl_defaults

    set_nccl_defaults()
    count = torch.cuda.device_count()
    if size > count:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def rank_device(kind: str) -> "torch.device":
    """Where a rank computes: the CPU, or for ``cuda`` the GPU that was made its current one."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _load(name: str, file: str) -> ModuleType:
    """Imports a module of ours by its name, others by path: pytest's test modules have no name."""
    if name.startswith("lib."):
        return importlib.import_module(name)
    name = "ranks_" + "_".join(Path(file).with_suffix("").parts[-3:])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_pool: list[_Pool] = []


def run_on_ranks(
    size: int,
    function: Callable[..., T],
    *arguments: Any,  # noqa: ANN401
    timeout: float = 60.0,
    device: Literal["cpu", "cuda"] = "cpu",
) -> list[T]:
    """Runs ``function(*arguments)`` on ``size`` ranks and returns their results by rank.

    Args:
        size: number of processes.
        function: a function of a module, not a closure.
        arguments: plain data and tensors.
        timeout: seconds that the slowest rank may take.
        device: ``cpu`` (gloo), or ``cuda``: one GPU a process (NCCL, and gloo for CPU tensors);
            processes that are more than the GPUs share these, slowly.

    Raises:
        AssertionError: a rank raised, died or did not finish in time; the text says which, and
            with what traceback.
    """
    if not _pool:
        _pool.append(_Pool())
        atexit.register(_pool[0].close)
    code, module = function.__code__, function.__module__
    call = _Call(module, code.co_filename, function.__qualname__, arguments, device)
    results = _pool[0].run(size, call, timeout)
    if device == "cuda":
        _pool[0].close()  # NCCL does not start a second time in a process
    return results
