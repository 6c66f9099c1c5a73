"""What the plan is checked on: models, layouts, micro batches and recomputation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lib.config.operation import RuntimeConfig
from lib.config.run_config import Params
from lib.config.schema import ModelSection, ParallelConfig
from lib.plan.ceilings import Ceilings
from lib.plan.memory import GIB, StageMemory, stage_memories
from lib.plan.report import batches_text, recompute_text
from lib.plan.time import StepTime, step_time
from lib.plan.work import Work, works_of
from lib.workflow.shapes import REFERENCES, Compute, Shape, measured_run

HEADERS = (
    *("model", "layout", "batches", "recompute"),
    *("plan GiB", "GiB", "error", "reserved", "plan ms", "ms", "error"),
)
_FIGURES = ("plan GiB", "GiB", "GiB error", "reserved", "plan ms", "ms", "ms error")
_TINY_MODEL = ModelSection(num_layers=2, hidden_size=32, num_attention_heads=4)
_TINY = Shape("tiny", _TINY_MODEL, 300, seq_length=16, micro_batch_size=2, micro_batches=2)
_SHAPES = REFERENCES | {"tiny": _TINY}
_FULL = {"recompute": "full"}
_HALF = {"recompute": "full", "recompute_method": "block", "recompute_layers": 12}
_FOURS = {"recompute": "full", "recompute_layers": 4}
_TP = {"tensor": 2, "sequence": True}
_Sizes = tuple[int, int]  # samples of a micro batch, micro batches of a step on each copy
_Spec = tuple[str, _Sizes, Mapping[str, object], Mapping[str, object]]


@dataclass(frozen=True)
class Case:
    """One run to plan and to measure.

    Attributes:
        shape: the model and its batches.
        layout: ``data`` is a number.
        compute: number type.
        runtime: section ``runtime``.
    """

    shape: Shape
    layout: ParallelConfig
    compute: Compute
    runtime: RuntimeConfig

    @property
    def ranks(self) -> int:
        """Of the layout."""
        return self.layout.processes

    @property
    def params(self) -> Params:
        """The sections of the run."""
        return measured_run(self.shape, self.layout, self.compute)

    def text(self) -> str:
        """What it is, in a few words."""
        work = self.work("auto")
        layout, batches = work.parallel.name, batches_text(work)
        return f"{self.shape.name} {layout}, {batches}, recompute {recompute_text(work)}"

    def work(self, attention: str) -> Work:
        """What is planned, with the attention that the ranks took."""
        runtime = self.runtime.model_copy(update={"attention": attention})
        return works_of(self.params, runtime, self.shape.vocab_size, self.ranks)[0]


@dataclass(frozen=True)
class RankUse:
    """What one rank measured.

    Attributes:
        attention: the backend that it computed with.
        seconds: median of a step.
        allocated: most bytes of tensors at once; None on a CPU.
        reserved: most bytes that torch held; None on a CPU.
        before: bytes of tensors before the run was built, which its figures contain.
    """

    attention: str
    seconds: float
    allocated: int | None
    reserved: int | None
    before: int = 0


def _case(runtime: RuntimeConfig, spec: _Spec) -> Case:
    name, (size, count), layout, recompute = spec
    return Case(
        replace(_SHAPES[name], micro_batch_size=size, micro_batches=count),
        ParallelConfig.model_validate({"data": 1} | dict(layout)),
        "fp32" if name == "tiny" else "bf16",
        runtime.model_copy(update={"recompute": "none"} | dict(recompute)),
    )


def usual_cases(runtime: RuntimeConfig, gpus: int) -> list[Case]:
    """Those of so many GPUs, of 141 GB each; without any, tiny ones for one and two processes."""
    one: list[_Spec] = [
        ("125m", (16, 4), {}, {}),
        ("125m", (64, 1), {}, {}),
        ("125m", (64, 2), {}, _FULL),
        ("1.4b", (8, 4), {}, {}),
        ("1.4b", (4, 4), {}, {}),
        ("1.4b", (16, 2), {}, {}),
        ("1.4b", (8, 2), {}, {"recompute": "selective"}),
        ("1.4b", (8, 2), {}, _HALF),
        ("1.4b", (32, 1), {}, _FULL),
        ("1.4b", (16, 2), {}, _FOURS),
        ("7b", (1, 2), {}, {}),
        ("7b", (1, 2), {}, _FULL),
        ("7b", (2, 2), {}, _FULL),
    ]
    two: list[_Spec] = [
        ("125m", (16, 4), {"data": 2}, {}),
        ("1.4b", (8, 4), {"data": 2}, {}),
        ("1.4b", (2, 4), {"data": 2, "sharding": "gradients"}, {}),
        ("1.4b", (8, 4), {"data": 2, "sharding": "parameters"}, {}),
        ("1.4b", (8, 4), _TP, {}),
        ("1.4b", (8, 2), {"tensor": 2}, {}),
        ("1.4b", (4, 16), {"pipeline": 2}, {}),
        ("1.4b", (4, 16), {"pipeline": 2, "virtual_stages": 2}, {}),
        ("7b", (1, 2), {"data": 2}, {}),
        ("7b", (4, 4), _TP, {}),
        ("7b", (2, 8), {"pipeline": 2}, {}),
    ]
    if gpus == 0:
        one = [("tiny", (2, 2), {}, {}), ("tiny", (1, 1), {}, _FULL)]
        two = [("tiny", (2, 2), {"data": 2}, {}), ("tiny", (1, 4), {"pipeline": 2}, {})]
    chosen = one if gpus == 1 else [*one, *two]
    return [_case(runtime, each) for each in chosen]


@dataclass(frozen=True)
class Checked:
    """A case with what was planned and what was measured.

    Attributes:
        case: what ran.
        work: what was planned.
        ranks: by rank.
        memories: planned, by pipeline stage.
        time: planned; None on a CPU.
    """

    case: Case
    work: Work
    ranks: Sequence[RankUse]
    memories: Sequence[StageMemory]
    time: StepTime | None

    @classmethod
    def of(cls, case: Case, ranks: Sequence[RankUse], ceilings: Ceilings | None) -> "Checked":
        """Plans a case that was measured."""
        work = case.work(ranks[0].attention)
        time = None if ceilings is None else step_time(work, ceilings)
        return cls(case, work, ranks, stage_memories(work), time)

    @property
    def planned_bytes(self) -> int:
        """Of the fullest rank."""
        return max(each.kinds.total for each in self.memories)

    @property
    def allocated(self) -> int | None:
        """Of the fullest rank, as measured."""
        return max(
            (each.allocated for each in self.ranks if each.allocated is not None), default=None
        )

    @property
    def reserved(self) -> int | None:
        """Of the rank for which torch held most."""
        return max(
            (each.reserved for each in self.ranks if each.reserved is not None), default=None
        )

    @property
    def seconds(self) -> float:
        """Of a step, by the slowest rank."""
        return max(each.seconds for each in self.ranks)

    def row(self) -> tuple[str, ...]:
        """For a table under ``HEADERS``."""
        used, held, time = self.allocated, self.reserved, self.time
        memory = ("", "", "", "")
        if used is not None and held is not None:
            error = _error(self.planned_bytes, used)
            memory = (_gib(self.planned_bytes), _gib(used), error, _gib(held))
        planned = (
            ("", "") if time is None else (_ms(time.seconds), _error(time.seconds, self.seconds))
        )
        return (
            self.case.shape.name,
            self.work.parallel.name,
            batches_text(self.work),
            recompute_text(self.work),
            *memory,
            planned[0],
            _ms(self.seconds),
            planned[1],
        )

    def line(self) -> str:
        """The figures of ``row``, to be said as soon as they are there."""
        figures = dict(zip(_FIGURES, self.row()[-len(_FIGURES) :], strict=True))
        parts = [f"{self.case.text()}:"]
        if figures["GiB"]:
            parts.append("plan {plan GiB} GiB, {GiB} GiB ({GiB error}),".format_map(figures))
        if figures["plan ms"]:
            parts.append("plan {plan ms} ms, {ms} ms ({ms error})".format_map(figures))
        else:
            parts.append(f"{figures['ms']} ms")
        return " ".join(parts)

    def mapping(self) -> dict[str, object]:
        """For programs: bytes by stage and rank, seconds."""
        return {
            "model": self.case.shape.name,
            "layout": self.work.parallel.name,
            "micro_batch_size": self.work.micro_batch_size,
            "micro_batches": self.work.micro_batches,
            "recompute": recompute_text(self.work),
            "attention": self.work.runtime.attention,
            "planned": [
                {"moment": m.moment, "total": m.kinds.total} | m.kinds.by_name()
                for m in self.memories
            ],
            "allocated": [each.allocated for each in self.ranks],
            "reserved": [each.reserved for each in self.ranks],
            "before": [each.before for each in self.ranks],
            "planned_seconds": None if self.time is None else self.time.seconds,
            "seconds": self.seconds,
        }


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _error(planned: float, measured: float) -> str:
    return f"{planned / measured - 1:+.1%}"
