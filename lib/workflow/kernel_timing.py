"""Times the operations of ``kernels`` on a GPU, in all the ways that there are to compute them.

A run is between two events in the GPU's queue. Before it come fresh inputs, since some ways write
over them, and copies that are larger than the L2 cache, so that it finds none of them there; while
those are made the host gets ahead, as in training, and the time of its launches does not count
unless they take longer than the work. A way that waits for the GPU in between pays for it.

What runs by kernels, ours or Liger's, is compared with the torch form first.
"""

import statistics
from collections.abc import Callable

import torch

from lib.console import warn
from lib.layers.attention_choice import reason_of
from lib.workflow.kernel_cases import (
    BOTH,
    CASES,
    COMPILED,
    FORWARD,
    LIGER,
    OURS,
    TORCH,
    Fresh,
    KernelCase,
    Setting,
    Way,
    results,
)
from lib.workflow.kernel_report import FAILED, NO_MEMORY, NOT_INSTALLED, KernelTimes

# Nothing of use is prepared by a function that is timed; it gives what is.
Prepare = Callable[[], Callable[[], object]]

_WARM_UPS, _RUNS = 5, 30
_COPIES = 8  # before each run; two milliseconds on an H200, longer than autograd takes to launch
_LEAST_BYTES = 2**29
_CACHES = 4  # copied bytes, in L2 caches

# Norm of the difference over the norm: several times what rounding does.
_TOLERANCES = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-10}


class Clock:
    """Takes the time of work on a GPU.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._source = torch.zeros(
            max(_LEAST_BYTES, _CACHES * cache), dtype=torch.uint8, device=device
        )
        self._target = torch.empty_like(self._source)

    def milliseconds(self, prepare: Prepare) -> float:
        """The median over the runs.

        Args:
            prepare: gives what is to be timed, once for each run.
        """
        marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(_WARM_UPS + _RUNS):
            run = prepare()
            for _ in range(_COPIES):
                self._copy()
            before = torch.cuda.Event(enable_timing=True)
            after = torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            marks.append((before, after))
        torch.cuda.synchronize(self._source.device)
        return statistics.median(before.elapsed_time(after) for before, after in marks[_WARM_UPS:])

    def copy_rate(self) -> float:
        """Bytes that a large copy reads and writes in a second."""
        return 2e3 * self._source.nbytes / self.milliseconds(lambda: self._copy)

    def _copy(self) -> None:
        self._target.copy_(self._source)


def time_kernel(
    name: str, setting: Setting, milliseconds: Callable[[Prepare], float]
) -> KernelTimes:
    """Times all ways of one operation; one that fails is told of, and has no times.

    Args:
        name: of ``CASES``.
        setting: sizes, number type and device.
        milliseconds: times what it is given, as ``Clock`` does.
    """
    found = KernelTimes(name)
    try:
        case = CASES[name](setting)
    except Exception as error:
        found.without[OURS] = _told(f"{name}, its inputs", error)
        return found
    for which in case.passes:
        found.milliseconds[which] = {}
        found.moved[which] = case.bytes_of(which)
    for way_name in case.ways:
        try:
            torch.cuda.empty_cache()  # of what the way before left, whose sizes are others
            way = _ready(way_name, case, setting.dtype)
            for which in case.passes:
                found.milliseconds[which][way_name] = milliseconds(_runs_of(way, which))
        except ImportError as error:
            found.without[way_name] = (
                NOT_INSTALLED if way_name == LIGER else _told(f"{name}, {way_name}", error)
            )
        except Exception as error:
            found.without[way_name] = _told(f"{name}, {way_name}", error)
    return found


def _told(what: str, error: Exception) -> str:
    """Tells of an error; gives what stands in the table."""
    warn(f"{what}: {reason_of(error)}")
    return NO_MEMORY if isinstance(error, torch.OutOfMemoryError) else FAILED


def _ready(name: str, case: KernelCase, dtype: torch.dtype) -> Way:
    """A way that can be timed.

    Raises:
        ArithmeticError: its results are wrong.
        ImportError: its package is not installed.
    """
    way = case.ways[name]()
    if name == COMPILED:
        torch.compiler.reset()  # it would go over to sizes that vary, and give up after some
        return way.with_forward(torch.compile(way.forward, dynamic=False))
    if name != TORCH:
        _compare(way, case.ways[TORCH](), _TOLERANCES[dtype])
    return way


def _compare(way: Way, plain: Way, tolerance: float) -> None:
    for place, (one, expected) in enumerate(zip(results(way), results(plain), strict=True)):
        size = max(float(torch.linalg.vector_norm(expected, dtype=torch.float32)), 1e-30)
        difference = torch.linalg.vector_norm(one - expected, dtype=torch.float32)
        error = float(difference) / size
        if not error <= tolerance:  # not a number is wrong too
            raise ArithmeticError(f"wrong result {place}, off by {error:.2g} of its size")


def _runs_of(way: Way, which: str) -> Prepare:
    def prepare() -> Callable[[], object]:
        fresh = Fresh(way)
        if which == FORWARD:
            return fresh.forward
        if which == BOTH:
            return lambda: fresh.backward(fresh.forward())
        outputs = fresh.forward()
        return lambda: fresh.backward(outputs)

    return prepare
