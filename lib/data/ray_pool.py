"""The work of ``ProcessPool`` as tasks of a Ray cluster.

Ray is optional and imported here alone. Its workers import this project and open the tokenizer's
folder by the paths they have here: every machine must see both at the same place, and have the
same packages. Items and results travel through Ray.
"""

import importlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from lib.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

# Times that Ray begins an item again whose worker, or machine, died.
_RETRIES = 3
_SECONDS_TO_CONNECT = 10.0


class RayPool(Generic[T, R]):
    """Applies one function to many items on a Ray cluster. Use as a context manager.

    Attributes:
        count: processors of the cluster, or the limit that was set.
    """

    def __init__(self, function: Callable[[T], R], address: str, limit: int | None) -> None:
        """Takes the function and where to work.

        Args:
            function: what to apply; it can be pickled.
            address: as for ``ray.init``: ``auto``, ``HOST:PORT``, or ``local`` for a cluster of
                this machine that lasts as long as the pool.
            limit: most items to work on at once; None for all processors.

        Raises:
            UserError: when Ray is not installed.
        """
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise UserError(
                "--ray: the package ray is not installed; install it on every machine of the "
                "cluster (pip install ray), or leave --ray out"
            ) from None
        self._function = function
        self._address = address
        self._limit = limit
        self.count = 1

    def __enter__(self) -> Self:
        _check_address(self._address)
        # A cluster that is begun here reports to nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray sets a handler of its own, with another exit code.
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(address=self._address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(_no_cluster(self._address, error)) from None
        finally:
            signal.signal(signal.SIGTERM, handler)
        processors = int(self._ray.cluster_resources().get("CPU", 1))
        self.count = max(1, min(processors, self._limit or processors))
        self._task: Any = self._ray.remote(max_retries=_RETRIES, num_cpus=1)(_apply)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ray.shutdown()

    def submit(self, item: T) -> Future[R]:
        """Hands an item over; begun again elsewhere when its worker dies."""
        result: Future[R] = Future()
        answer: Future[Any] = self._task.remote(self._function, item).future()
        answer.add_done_callback(lambda done: self._settle(result, done))
        return result

    def _settle(self, result: Future[R], answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, self._ray.exceptions.RayTaskError):  # a fault of ours
            result.set_exception(error)
        elif error is not None:
            tries = f"{_RETRIES + 1} workers died of the same task"
            result.set_exception(
                UserError(
                    f"--ray {self._address}: {tries} ({_first_line(error)}); see Ray's logs, and "
                    "run again"
                )
            )
        elif isinstance(answer.result(), UserError):
            result.set_exception(answer.result())
        else:
            result.set_result(answer.result())


def _apply(function: Callable[[Any], Any], item: object) -> object:
    """What a worker does with an item; a user's error is a value, so that Ray never retries it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return function(item)
    except UserError as error:
        return error


def _check_address(address: str) -> None:
    """Refuses an address where nobody listens, for which Ray itself would wait five minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--ray {address}: must be auto, local or HOST:PORT, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise UserError(_no_cluster(address, error)) from None


def _no_cluster(address: str, error: Exception) -> str:
    return (
        f"--ray {address}: no cluster answers there ({_first_line(error)}); start one with: "
        "ray start --head"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
