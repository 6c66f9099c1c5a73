"""What is told of a plan: rows of tables for a person, and a mapping for programs."""

from collections.abc import Sequence

from lib.plan.memory import GIB, StageMemory, largest_micro_batch
from lib.plan.search import Found, Machines
from lib.plan.time import StepTime
from lib.plan.work import Work

STAGE_HEADERS = (
    *("stage", "layers", "at", "kept"),
    *("weights", "grads", "optim", "activ", "logits", "buffers", "all"),
)
RANK_HEADERS = ("", "tokens/s", "ms", "GiB", "layout", "micro batches", "recompute")


def recompute_text(work: Work) -> str:
    """Recomputation in a few words."""
    runtime = work.runtime
    if runtime.recompute != "full":
        return runtime.recompute
    if runtime.recompute_method == "uniform" and runtime.recompute_layers == 1:
        return "full"
    return f"full, {runtime.recompute_method} {runtime.recompute_layers}"


def batches_text(work: Work) -> str:
    """Micro batches of a step and their size."""
    return f"{work.micro_batches} of {work.micro_batch_size}"


def stage_rows(work: Work, memories: Sequence[StageMemory]) -> list[tuple[str, ...]]:
    """A row per pipeline stage, in GiB."""
    layers, stages = work.layers_of_chunks, work.parallel.pipeline
    return [
        (
            str(each.stage),
            "+".join(map(str, layers[each.stage :: stages])),
            each.moment,
            str(each.in_flight),
            *(f"{size / GIB:.2f}" for size in each.kinds.by_name().values()),
            f"{each.kinds.total / GIB:.1f}",
        )
        for each in memories
    ]


def figure_rows(
    work: Work, time: StepTime, peak: StageMemory, machines: Machines
) -> list[tuple[str, str]]:
    """Names and values of the whole plan."""
    need, memory = peak.kinds.total, machines.memory
    fitting = largest_micro_batch(work, machines.usable)
    verdict = "fits" if need <= machines.usable else "does not fit"
    bound = "the host" if time.host_bound else "the GPU"
    rows = [
        ("layout", f"{work.parallel.name}: {work.ranks} x {machines.ceilings.device}"),
        ("micro batches of a step, on each copy", batches_text(work)),
        ("vocabulary", f"{work.vocab_size:,} rows, padding included"),
        ("memory", f"{need / GIB:.1f} of {memory / GIB:.1f} GiB a GPU: {verdict}"),
        ("what tensors may take of a GPU", f"{machines.usable / GIB:.1f} GiB"),
        (
            "largest micro batch that fits",
            "none" if fitting is None else str(fitting.micro_batch_size),
        ),
        ("model FLOPs of a step", _tflop(time.flops)),
        ("expected step", f"{time.seconds * 1e3:,.0f} ms; {bound} sets the pace"),
        ("of it transfers that nothing hides", f"{time.exposed * 1e3:,.0f} ms"),
        ("expected rate", f"{time.tokens_per_second:,.0f} tokens/s"),
        ("per GPU", f"{time.tflops_per_gpu:,.0f} TFLOP/s"),
    ]
    if work.parallel.pipeline > 1:
        rows.append(("pipeline stages wait", f"{time.bubble:.0%} of a step"))
    return [*rows, ("rates", rates_text(machines))]


def _tflop(operations: float) -> str:
    size = operations / 1e12
    return f"{size:,.0f} TFLOP" if size >= 100 else f"{size:.3g} TFLOP"


def rates_text(machines: Machines) -> str:
    """Where the rates come from."""
    if machines.ceilings.measured:
        return "measured on this kind of GPU"
    return "estimated from the datasheet by what an H200 reaches of its own, not measured"


def ranked_rows(found: Found, most: int) -> list[tuple[str, ...]]:
    """A row for each of the best layouts."""
    return [
        (
            str(place),
            f"{each.time.tokens_per_second:,.0f}",
            f"{each.time.seconds * 1e3:,.0f}",
            f"{each.memory.kinds.total / GIB:.1f}",
            each.work.parallel.name,
            batches_text(each.work),
            recompute_text(each.work),
        )
        for place, each in enumerate(found.ranked[:most], start=1)
    ]


def as_mapping(work: Work, memories: Sequence[StageMemory], time: StepTime) -> dict[str, object]:
    """One plan for programs; bytes, seconds."""
    return {
        "parallel": work.parallel.model_dump(),
        "micro_batch_size": work.micro_batch_size,
        "micro_batches": work.micro_batches,
        "recompute": {
            "recompute": work.runtime.recompute,
            "recompute_method": work.runtime.recompute_method,
            "recompute_layers": work.runtime.recompute_layers,
        },
        "layers_of_chunks": list(work.layers_of_chunks),
        "stages": [
            {
                "stage": each.stage,
                "moment": each.moment,
                "in_flight": each.in_flight,
                "bytes": each.kinds.by_name(),
                "total_bytes": each.kinds.total,
            }
            for each in memories
        ],
        "step_seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "tflops_per_gpu": time.tflops_per_gpu,
        "flops_per_step": time.flops,
        "exposed_seconds": time.exposed,
        "bubble": time.bubble,
        "host_bound": time.host_bound,
    }


def search_mapping(found: Found, machines: Machines) -> dict[str, object]:
    """A search for programs."""
    return {
        "gpu": machines.ceilings.device,
        "gpus": machines.gpus,
        "rates_measured": machines.ceilings.measured,
        "ranked": [as_mapping(each.work, [each.memory], each.time) for each in found.ranked],
        "fallen": [{"reason": reason, "layouts": count} for reason, count in found.fallen],
    }
