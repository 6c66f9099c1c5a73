"""What is told of measured training: figures, tables, and a line of JSON per measurement."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from lib.console import table
from lib.workflow.step_figures import RankFigures
from lib.workflow.trace_parts import Kernel, StepParts, kernels_by_time, read_trace, step_parts

OURS = "drydock"
_GIB = 2**30
_MOST_RANKS = 4
_TOP_KERNELS = 15


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        shape: name of the model.
        parameters: weights of the model.
        device: ``cpu`` or ``cuda``.
        layout: in words.
        pipeline: stages of the pipeline.
        processes: GPUs, or processes of a CPU.
        micro_batch_size: samples.
        micro_batches: of a step on each copy of the model.
        tokens_per_step: over all ranks.
        compute: number type.
        recompute: what backward computes again.
        flops_per_token: model FLOPs (``lib.model.flops``).
        peak_tflops: of one device; None where unknown.
    """

    shape: str
    parameters: int
    device: Literal["cpu", "cuda"]
    layout: str
    pipeline: int
    processes: int
    micro_batch_size: int
    micro_batches: int
    tokens_per_step: int
    compute: str
    recompute: str
    flops_per_token: float
    peak_tflops: float | None

    @property
    def name(self) -> str:
        """For the names of files."""
        return re.sub(r"[ /]", "-", f"{self.shape}-{self.layout}")


@dataclass(frozen=True)
class Measurement:
    """One way of training one subject.

    Attributes:
        subject: what.
        way: by whom.
        device_name: of the first rank.
        attention: its backend; empty where it is not known.
        step_ms: median over the steps, each that of the slowest rank.
        step_ms_range: the fastest and the slowest step.
        tokens_per_second: over all ranks.
        tflops_per_gpu: model FLOPs.
        mfu: fraction of the peak; None where that is unknown.
        peak_bytes: most memory in use, by rank; empty where it is not known.
        data_wait_ms: of the first rank; 0 for others than Drydock.
        losses: of all steps from the first.
        parts: of a traced step, by rank; empty without a trace.
    """

    subject: Subject
    way: str
    device_name: str
    attention: str
    step_ms: float
    step_ms_range: tuple[float, float]
    tokens_per_second: float
    tflops_per_gpu: float
    mfu: float | None
    peak_bytes: list[int]
    data_wait_ms: float
    losses: list[float]
    parts: list[StepParts] = field(default_factory=list)

    def json_line(self) -> str:
        """All of it as one line."""
        found = asdict(self)
        found |= found.pop("subject")
        found["parts"] = [{"step": each.step} | each.rows() for each in self.parts]
        return json.dumps(found)


def summaries(
    subject: Subject, ranks: Sequence[RankFigures], profile: Path | None
) -> list[Measurement]:
    """Figures of each way that the ranks measured.

    Args:
        subject: what was measured.
        ranks: by rank.
        profile: folder for a table of the first rank's kernels, which is also shown; None for
            none.
    """
    found: list[Measurement] = []
    for way in ranks[0].ways if ranks else ():
        times = [rank.ways[way] for rank in ranks]
        events = [
            read_trace(each.trace, subject.device, pipeline=subject.pipeline > 1)
            for each in times
            if each.trace
        ]
        parts = [
            step_parts(each, time.traced_ms) for each, time in zip(events, times, strict=False)
        ]
        found.append(summarize(subject, way, ranks, parts))
        if profile is not None:
            kernels = kernels_by_time(events[0])
            name = f"{subject.name}-{way}"
            write_kernels(profile / f"{name}-kernels.csv", kernels)
            table(
                f"{name}: what takes longest on the first rank",
                kernel_rows(kernels, _TOP_KERNELS),
                headers=("name", "part", "calls", "ms", "share"),
            )
    return found


def summarize(
    subject: Subject, way: str, ranks: Sequence[RankFigures], parts: Sequence[StepParts]
) -> Measurement:
    """Figures of all ranks together.

    Args:
        subject: what was measured.
        way: which of the ways; ``OURS``, or the name of another.
        ranks: by rank.
        parts: by rank, of the way's traces.
    """
    times = [rank.ways[way] for rank in ranks]
    slowest = [max(each) for each in zip(*(time.seconds for time in times), strict=True)]
    seconds = statistics.median(slowest)
    rate = subject.tokens_per_step / seconds
    tflops = rate * subject.flops_per_token / subject.processes / 1e12
    is_ours = way == OURS
    return Measurement(
        subject=subject,
        way=way,
        device_name=ranks[0].device,
        attention=ranks[0].attention if is_ours else "",
        step_ms=seconds * 1e3,
        step_ms_range=(min(slowest) * 1e3, max(slowest) * 1e3),
        tokens_per_second=rate,
        tflops_per_gpu=tflops,
        mfu=None if subject.peak_tflops is None else tflops / subject.peak_tflops,
        peak_bytes=[time.peak_bytes for time in times if time.peak_bytes is not None],
        data_wait_ms=ranks[0].data_wait_ms if is_ours else 0.0,
        losses=times[0].losses,
        parts=list(parts),
    )


def tell(found: Sequence[Measurement], json_file: Path | None) -> None:
    """Shows the tables and appends to the file, a line per measurement."""
    for ours in found:
        if ours.way == OURS and ours.parts:
            beside = (e for e in found if e.way != OURS and _model_of(e) == _model_of(ours))
            headers, rows = parts_table(ours, next(beside, None))
            table(f"{ours.subject.shape} {ours.subject.layout}: a step", rows, headers=headers)
    table(f"training on {found[0].device_name}", figure_rows(found), headers=HEADERS)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        with json_file.open("a", encoding="utf-8") as file:
            file.writelines(each.json_line() + "\n" for each in found)


HEADERS = ("model", "by", "layout", "micro b.", "tokens/s", "TFLOP/s", "MFU", "GiB", "/ plain")


def figure_rows(found: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """A line for each measurement under ``HEADERS``.

    TFLOP/s are those of one device, GiB of the fullest. The last column is Drydock's rate per
    device over that of the plain way for the same model and micro batch.
    """
    plain = {
        _model_of(each): each.tokens_per_second / each.subject.processes
        for each in found
        if each.way != OURS
    }
    return [
        (
            each.subject.shape,
            each.way,
            each.subject.layout,
            f"{each.subject.micro_batches} x {each.subject.micro_batch_size}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.tflops_per_gpu:.3g}",
            "" if each.mfu is None else f"{each.mfu:.1%}",
            f"{max(each.peak_bytes) / _GIB:.1f}" if each.peak_bytes else "",
            _ratio(each, plain.get(_model_of(each))),
        )
        for each in found
    ]


def _model_of(each: Measurement) -> tuple[str, int]:
    return each.subject.shape, each.subject.micro_batch_size


def _ratio(each: Measurement, plain: float | None) -> str:
    if plain is None or each.way != OURS:
        return ""
    return f"{each.tokens_per_second / each.subject.processes / plain:.3f}"


def parts_table(
    ours: Measurement, plain: Measurement | None
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows: milliseconds and share of the traced step by part, for each rank.

    Args:
        ours: a measurement with parts.
        plain: whose parts go beside, for the same number of micro batches.
    """
    shown = list(ours.parts[:_MOST_RANKS])
    titles = ["rank " + str(rank) for rank in range(len(shown))] if len(shown) > 1 else [ours.way]
    if plain is not None and plain.parts:
        shown.append(plain.parts[0])
        titles.append(plain.way)
    rows: list[tuple[str, ...]] = [("whole step", *(f"{each.step:.1f}" for each in shown))]
    for name in shown[0].rows():
        cells = [(each.rows()[name], each.step) for each in shown]
        if any(ms for ms, _ in cells):
            rows.append((name, *(f"{ms:.1f}  {ms / step:6.1%}" for ms, step in cells)))
    return ("ms", *titles), rows


def kernel_rows(kernels: Sequence[Kernel], most: int) -> list[tuple[str, ...]]:
    """The kernels that take longest: name, part, calls, ms, share of all kernels' time."""
    total = sum(each.ms for each in kernels) or 1.0
    return [
        (
            each.name if len(each.name) <= 60 else f"{each.name[:57]}...",
            each.part,
            str(each.calls),
            f"{each.ms:.2f}",
            f"{each.ms / total:.1%}",
        )
        for each in kernels[:most]
    ]


def write_kernels(path: Path, kernels: Sequence[Kernel]) -> None:
    """All kernels as CSV, with their whole names."""
    lines = ["part,calls,ms,name"]
    for each in kernels:
        name = each.name.replace('"', "'")
        lines.append(f'{each.part},{each.calls},{each.ms:.4f},"{name}"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
