"""Where the time of a step goes, from the trace of one: milliseconds by part.

A trace is a list of events: kernels and copies of a GPU, each on a stream, or operators of a CPU,
each on a thread, cut to the time that they spend themselves. Several may run at once, so an instant
counts once, for the first of these parts that has something running:

    products      matrix products
    attention     its core: scores, softmax, weighted sum
    pointwise     norms, rotary angles, activations, cross entropy, look-ups: all that is not named
    optimizer     AdamW, clipping, and what else updates many tensors at once
    collectives   exposed: between GPUs, with none of the above beside it
    transfers     exposed: between pipeline stages, which is also where a stage waits for another
    copies        within a device and to the host
    idle          nothing runs: the device waits for the host

They add up to the step. Hidden is what collectives and transfers take beside the first four. A
collective lasts until the slowest rank has come, so waiting for others is part of it; on a CPU such
waiting is idle.

NCCL runs transfers between stages and all-to-all exchanges between the ranks of a layer by a kernel
of one name. Which it was is told, from the surest to the least sure, by the collective's name in
the event's arguments (only there if the host was traced too); by the layout: without a pipeline
there are no transfers; by the stream, since every process group has its own: where other
collectives run too, it was an exchange, and else a transfer. So with a pipeline, exchanges of a
group that does nothing else beside the stream of the work would count as transfers.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

COMMUNICATION = ("collectives", "transfers")
_WORK = ("products", "attention", "pointwise", "optimizer")
PARTS = (*_WORK, *COMMUNICATION, "copies")

# Names of kernels, and of operators on a CPU. The first pattern that is found decides, since the
# templates of attention's kernels name cutlass too.
_PATTERNS = (
    ("transfers", r"ncclDevKernel_SendRecv|(gloo:|nccl:|c10d::)(send|recv)"),
    ("collectives", r"nccl|gloo:|c10d::|multimem|symm_mem|(one|two)_shot"),
    ("attention", r"sdpa|fmha|flash|mha_|cudnn|attention|aten::_softmax"),
    ("optimizer", r"multi_tensor|adam|_foreach"),
    ("products", r"nvjet|gemm|gemv|cublas|cutlass|splitk|xmma|dot_kernel"),
    ("products", r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv)_?$|mkldnn_linear|onednn"),
    ("copies", r"memcpy|memset|aten::(copy_|_to_copy)$"),
)
_COMPILED = tuple((part, re.compile(pattern, re.IGNORECASE)) for part, pattern in _PATTERNS)
_EITHER = re.compile("ncclDevKernel_SendRecv")
_TRANSFERS = re.compile("send|recv", re.IGNORECASE)
_CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}


@dataclass(frozen=True)
class Event:
    """Something that ran, in microseconds.

    Attributes:
        name: of the kernel, copy or operator.
        start: since some moment.
        duration: how long.
        stream: where it ran; what is on one stream never overlaps.
        begins: False for a later piece of something that was cut.
        known_part: the part that it belongs to where its name does not tell; else empty.
    """

    name: str
    start: float
    duration: float
    stream: str
    begins: bool = True
    known_part: str = ""

    @property
    def part(self) -> str:
        """The part that it belongs to."""
        return self.known_part or part_of(self.name)


@dataclass(frozen=True)
class StepParts:
    """The time of one step on one rank, in milliseconds.

    Attributes:
        step: the whole.
        parts: by part as above, "idle" included; they add up to ``step``.
        hidden: of collectives and transfers, what ran beside work.
    """

    step: float
    parts: dict[str, float]
    hidden: dict[str, float]

    def rows(self) -> dict[str, float]:
        """All figures by the name that a person reads."""
        names = {part: f"{part}, exposed" for part in COMMUNICATION}
        found = {names.get(part, part): value for part, value in self.parts.items()}
        return found | {f"{part}, hidden": value for part, value in self.hidden.items()}


@dataclass(frozen=True)
class Kernel:
    """All events of one name and part: how many, and their milliseconds added up."""

    name: str
    part: str
    calls: int
    ms: float


def part_of(name: str) -> str:
    """The part that a kernel or an operator belongs to, by its name."""
    return next((part for part, pattern in _COMPILED if pattern.search(name)), "pointwise")


def step_parts(events: Iterable[Event], step_ms: float) -> StepParts:
    """Divides a step among its parts.

    Args:
        events: of one rank, within the step.
        step_ms: from the step's begin to its end, by the clock.
    """
    borders: list[tuple[float, int, str]] = []
    for event in events:
        part = event.part
        borders += [(event.start, 1, part), (event.start + event.duration, -1, part)]
    borders.sort()
    parts, hidden = dict.fromkeys(PARTS, 0.0), dict.fromkeys(COMMUNICATION, 0.0)
    running: Counter[str] = Counter()
    before = 0.0
    for moment, change, part in borders:
        shown = next((each for each in PARTS if running[each]), None)
        if shown is not None:
            parts[shown] += (moment - before) / 1e3
        if shown in _WORK:
            for each in COMMUNICATION:
                hidden[each] += (moment - before) / 1e3 if running[each] else 0.0
        running[part] += change
        before = moment
    parts["idle"] = max(0.0, step_ms - sum(parts.values()))
    return StepParts(step_ms, parts, hidden)


def kernels_by_time(events: Iterable[Event]) -> list[Kernel]:
    """Events of the same name and part together, those that took longest first."""
    together: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        together[event.name, event.part].append(event)
    found = [
        Kernel(
            name,
            part,
            sum(event.begins for event in each),
            sum(event.duration for event in each) / 1e3,
        )
        for (name, part), each in together.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)


def read_trace(path: Path, device: Literal["cpu", "cuda"], *, pipeline: bool) -> list[Event]:
    """The events of a trace that torch's profiler exported.

    Args:
        path: JSON in Chrome's format, packed by gzip where its name ends in ``.gz``.
        device: whose events are wanted.
        pipeline: whether the layout has more than one pipeline stage.
    """
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    wanted = _CATEGORIES[device]
    events = [
        _event(each, device)
        for each in json.loads(text)["traceEvents"]
        if each.get("ph") == "X" and each.get("cat") in wanted
    ]
    return own_time(events) if device == "cpu" else _told_apart(events, pipeline=pipeline)


def _event(found: dict[str, Any], device: str) -> Event:
    name, args, stream, part = found["name"], found.get("args", {}), found["tid"], ""
    if device == "cuda":
        stream = args.get("stream", stream)
        if _EITHER.search(name) and (collective := args.get("Collective name")):
            part = "transfers" if _TRANSFERS.search(collective) else "collectives"
    return Event(name, float(found["ts"]), float(found["dur"]), str(stream), known_part=part)


def _told_apart(events: Sequence[Event], *, pipeline: bool) -> list[Event]:
    """Events with what layout and streams tell of NCCL's kernel of two meanings (see above)."""
    streams = {event.stream for event in events if event.part == "collectives"}
    return [
        replace(event, known_part="collectives")
        if _EITHER.search(event.name)
        and not event.known_part
        and (not pipeline or event.stream in streams)
        else event
        for event in events
    ]


def own_time(events: Sequence[Event]) -> list[Event]:
    """Cuts operators to the pieces in which none that they call runs.

    Args:
        events: on each stream either apart or one within the other, as calls are.
    """
    pieces: list[Event] = []
    by_stream: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_stream[event.stream].append(event)
    for each in by_stream.values():
        each.sort(key=lambda event: (event.start, -event.duration))
        calls: list[Event] = []  # the innermost last
        now = 0.0
        for event in each:
            now = _finish(calls, event.start, now, pieces)
            if calls:
                _add(pieces, calls[-1], now, event.start)
            calls.append(event)
            now = event.start
        _finish(calls, float("inf"), now, pieces)
    return pieces


def _finish(calls: list[Event], until: float, now: float, pieces: list[Event]) -> float:
    """Ends the calls that are over at ``until``; gives the moment up to which all is told."""
    while calls and calls[-1].start + calls[-1].duration <= until:
        ended = calls.pop()
        end = ended.start + ended.duration
        _add(pieces, ended, now, end)
        now = max(now, end)
    return now


def _add(pieces: list[Event], call: Event, start: float, end: float) -> None:
    if end > start:
        begins = start == call.start
        pieces.append(Event(call.name, start, end - start, call.stream, begins))
