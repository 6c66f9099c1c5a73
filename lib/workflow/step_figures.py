"""What goes to the ranks that time steps, and what comes back from them. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TimingPlan:
    """How steps are timed.

    Attributes:
        warmup: steps that are not timed: kernels are compiled, memory is taken.
        steps: timed ones.
        traces: folder for the trace of a further step, for ``lib.workflow.trace_parts``; None
            makes none.
        profile: folder for a trace that a person looks at, on a GPU with what the host does; None
            makes none. On a CPU it is the same trace.
        label: begins the names of the files.
    """

    warmup: int
    steps: int
    traces: Path | None = None
    profile: Path | None = None
    label: str = "step"


@dataclass(frozen=True)
class StepTimes:
    """What was measured of one way on one rank.

    Attributes:
        losses: of all steps from the first on, nats per token.
        seconds: of each timed step.
        peak_bytes: most memory that was in use during the timed steps: on a GPU the allocator's,
            on a CPU the process's; None where several ways share a process.
        trace: its file; None if there is none.
        traced_ms: of the step in the trace.
    """

    losses: list[float]
    seconds: list[float]
    peak_bytes: int | None
    trace: Path | None = None
    traced_ms: float = 0.0


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured.

    Attributes:
        device: its name.
        attention: the backend that Drydock computed with.
        data_wait_ms: median over the steps of what they waited for data.
        ways: by the name of the way of taking steps.
    """

    device: str
    attention: str
    data_wait_ms: float
    ways: dict[str, StepTimes]
