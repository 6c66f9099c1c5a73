"""Times optimizer steps, of one way of taking them or of several in turns, on one rank.

Machines drift from minute to minute, so ways that are to be compared take their steps in turns in
one process. Nothing is traced while steps are timed: traces are made of further steps.

On a GPU the host waits for none of the timed steps, as in a run, where it prepares the next step
while the GPU ends this one: events in the GPU's queue mark where each begins and ends, and are read
when all are done. What the GPU waits for the host in between counts too.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from lib.workflow.step_figures import StepTimes, TimingPlan

Step = Callable[[], float | Tensor]
_Mark = float | torch.cuda.Event


def time_steps(
    ways: Mapping[str, Step], plan: TimingPlan, device: torch.device, rank: int
) -> dict[str, StepTimes]:
    """Times every way; on all ranks alike, as steps are.

    Args:
        ways: each takes its next step and gives the loss, which a GPU may still be computing.
        plan: how.
        device: on which the ways compute.
        rank: of this process, for the names of files.
    """
    losses: dict[str, list[float | Tensor]] = {name: [] for name in ways}
    marks: dict[str, list[tuple[_Mark, _Mark]]] = {name: [] for name in ways}
    for number in range(plan.warmup + plan.steps):
        if number == 0 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for name, step in ways.items():
            started = _mark(device)
            losses[name].append(step())
            if number >= plan.warmup:
                marks[name].append((started, _mark(device)))
    _wait(device)
    peak = _peak_bytes(device) if len(ways) == 1 else None
    found: dict[str, StepTimes] = {}
    for name, step in ways.items():
        path, ms = _trace(step, plan, device, f"{plan.label}-{name}-rank{rank}")
        seconds = [_seconds(*each) for each in marks[name]]
        found[name] = StepTimes([float(each) for each in losses[name]], seconds, peak, path, ms)
    return found


def _mark(device: torch.device) -> _Mark:
    """This moment; on a GPU the one at which its present stream comes to here."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(before: _Mark, after: _Mark) -> float:
    """Between two moments of one device, both of which are past."""
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    assert isinstance(after, torch.cuda.Event)
    return before.elapsed_time(after) / 1e3


def _trace(
    step: Step, plan: TimingPlan, device: torch.device, name: str
) -> tuple[Path | None, float]:
    """Traces a step: once for its parts, and again for a person if that is another trace."""
    if plan.traces is None:
        return None, 0.0
    path = plan.traces / f"{name}.json"
    shown = None if plan.profile is None else plan.profile / f"{name}.json.gz"
    if device.type == "cpu":
        path = shown or path
        return path, _trace_step(step, [ProfilerActivity.CPU], path)
    # Without the host's side, whose tracing would slow the launches down and so the step.
    ms = _trace_step(step, [ProfilerActivity.CUDA], path)
    if shown is not None:
        _trace_step(step, [ProfilerActivity.CPU, ProfilerActivity.CUDA], shown)
    return path, ms


def _trace_step(step: Step, activities: list[ProfilerActivity], path: Path) -> float:
    """Writes the trace of a step, after one that the tracing warms up with; gives its ms."""
    ms = 0.0

    def write(tracing: profile) -> None:
        tracing.export_chrome_trace(str(path))

    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=write,
        acc_events=True,  # else it warns that it keeps one cycle, which is all there is
    ) as tracing:
        for _ in range(2):
            started = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ms = (time.perf_counter() - started) * 1e3
            tracing.step()
    return ms


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
