"""Worker processes that cannot hang their parent, however they die.

``concurrent.futures.ProcessPoolExecutor`` shares one pipe for all results and keeps its writing end
open in the parent: when a process is killed in the middle of a result, the parent waits for the
rest for ever. Here each process has a pipe of its own, of which the parent holds one end only, and
a thread of the parent that hands it work: a dead process is an end of file.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from lib.cli import die_with_parent
from lib.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
Item = TypeVar("Item", contravariant=True)


class Pool(Protocol[Item, R]):
    """What applies a function to items: here, in processes, or on other machines.

    Attributes:
        count: items that are worked on at once.
    """

    count: int

    def __enter__(self) -> Self:
        """Starts it."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it; at once, when the block raised."""
        ...

    def submit(self, item: Item) -> Future[R]:
        """Hands an item over."""
        ...


class NoProcesses(Generic[T, R]):
    """The work done at once, by the caller itself.

    Attributes:
        count: 1.
    """

    def __init__(self, function: Callable[[T], R]) -> None:
        """Takes the function to apply."""
        self._function = function
        self.count = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def submit(self, item: T) -> Future[R]:
        """Works on the item; an error is raised here and now."""
        future: Future[R] = Future()
        future.set_result(self._function(item))
        return future


class ProcessPool(Generic[T, R]):
    """Applies one function to many items in processes.

    Use as a context manager, from the main thread. When the block raises, the processes are killed
    at once; when the parent is killed they end by themselves.

    Attributes:
        count: the number of processes.
    """

    def __init__(self, function: Callable[[T], R], count: int) -> None:
        """Takes a function that can be pickled, and the number of processes."""
        self._function = function
        self.count = count

    def __enter__(self) -> Self:
        self._workers = [_Worker(self._function) for _ in range(self.count)]
        self._free: SimpleQueue[_Worker[T, R]] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(self.count)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def submit(self, item: T) -> Future[R]:
        """Hands an item over; the result is a ``UserError`` when the process dies of it."""
        return self._threads.submit(self._apply, item)

    def _apply(self, item: T) -> R:
        worker = self._free.get()
        try:
            return worker.apply(item)
        finally:
            self._free.put(worker)


class _Worker(Generic[T, R]):
    """One process and the parent's end of its pipe."""

    def __init__(self, function: Callable[[T], R]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(function, theirs), daemon=True)
        self._process.start()
        # With its only copy in the process, a dead process is an end of file here.
        theirs.close()

    def apply(self, item: T) -> R:
        try:
            self._connection.send(item)
            result: R | UserError = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise UserError(_how_it_ended(self._process.exitcode or 0)) from None
        if isinstance(result, UserError):
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Ends the process by closing its pipe."""
        self._connection.close()
        self._process.join()


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    """What a process does: ends with its parent, leaves Ctrl-C to it, starts no threads."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):  # the parent has closed the pipe, or is gone
            return
        try:
            result = function(item)
        except UserError as error:
            result = error
        connection.send(result)


def _how_it_ended(code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = ", most likely because memory ran out" if code == -signal.SIGKILL else ""
    return f"a worker process {how}{hint}; run again, with fewer tokens.workers if memory is short"
