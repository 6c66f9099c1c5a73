"""Times optimizer steps, of one way of taking them or of several in turns, on one rank.

Machines drift from minute to minute, so ways that are to be compared take their steps in turns in
one process. Nothing is traced while steps are timed: traces are made of further steps.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lib.workflow.step_figures import StepTimes, TimingPlan

Step = Callable[[], float]


def time_steps(
    ways: Mapping[str, Step], plan: TimingPlan, device: torch.device, rank: int
) -> dict[str, StepTimes]:
    """Times every way; on all ranks alike, as steps are.

    Args:
        ways: each takes its next step and gives the loss.
        plan: how.
        device: on which the ways compute.
        rank: of this process, for the names of files.
    """
    losses: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(plan.warmup + plan.steps):
        if number == plan.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for name, step in ways.items():
            started = time.perf_counter()
            losses[name].append(step())
            _wait(device)
            if number >= plan.warmup:
                seconds[name].append(time.perf_counter() - started)
    peak = _peak_bytes(device) if len(ways) == 1 else None
    found: dict[str, StepTimes] = {}
    for name, step in ways.items():
        path, ms = _trace(step, plan, device, f"{plan.label}-{name}-rank{rank}")
        found[name] = StepTimes(losses[name], seconds[name], peak, path, ms)
    return found


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
