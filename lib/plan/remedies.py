"""What to change where a run does not fit, and what each change saves; and what else to warn of."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.errors import UserError
from lib.plan.ceilings import Ceilings, known_ceilings
from lib.plan.memory import GIB, USABLE, peak_memory
from lib.plan.search import largest_micro_batch
from lib.plan.time import step_time
from lib.plan.work import Work, works_of_run

_LARGE_BUBBLE = 0.2
_NEXT_SHARDING = {"optimizer": "gradients", "gradients": "parameters"}


@dataclass(frozen=True)
class Remedy:
    """A change of params.yaml.

    Attributes:
        text: the keys and what to write.
        saved: bytes of the fullest rank; negative where it would need more.
    """

    text: str
    saved: int


def remedies(work: Work) -> list[Remedy]:
    """The changes that save memory, those with the least side effects first.

    In this order: micro batch, recomputation, sequence, sharding, sequence parallelism, tensor and
    pipeline parallelism (over as many ranks, so with fewer copies, or over more).
    """
    now = peak_memory(work).kinds.total
    found = [Remedy(text, now - peak_memory(other).kinds.total) for text, other in _changes(work)]
    return [remedy for remedy in found if remedy.saved > 0]


def _changes(work: Work) -> Iterator[tuple[str, Work]]:
    if work.micro_batch_size > 1:
        size = work.micro_batch_size // 2
        other = replace(work, micro_batch_size=size, micro_batches=2 * work.micro_batches)
        yield f"training.micro_batch_size: {size}", other
    modes = {"none": ["selective", "full"], "selective": ["full"], "full": []}
    for mode in modes[work.runtime.recompute]:
        changed = {"recompute": mode, "recompute_method": "uniform", "recompute_layers": 1}
        runtime = work.runtime.model_copy(update=changed)
        yield f"runtime.recompute: {mode}", replace(work, runtime=runtime)
    length = work.seq_length // 2
    yield f"training.seq_length: {length}", replace(work, seq_length=length)
    parallel = work.parallel
    if work.shards > 1 and parallel.sharding in _NEXT_SHARDING:
        sharding = _NEXT_SHARDING[parallel.sharding]
        yield f"parallel.sharding: {sharding}", _laid(work, sharding=sharding)
    if parallel.tensor > 1 and not parallel.sequence:
        yield "parallel.sequence: true", _laid(work, sequence=True)
    tensor, stages = 2 * parallel.tensor, 2 * parallel.pipeline
    copies = max(1, work.copies // 2)
    if _divides(work, tensor):
        text = f"parallel.tensor: {tensor} with sequence: true"
        yield text, _laid(work, tensor=tensor, sequence=True, data=copies, data_shard=None)
    if stages * parallel.virtual_stages <= work.model.num_layers:
        changed = {"pipeline": stages, "layers_per_chunk": None, "data": copies}
        yield f"parallel.pipeline: {stages}", _laid(work, **changed, data_shard=None)


def _laid(work: Work, **changes: object) -> Work:
    """The work on another layout, its global batch the same."""
    other = replace(work, parallel=work.parallel.model_copy(update=changes))
    return replace(other, micro_batches=work.micro_batches * work.copies // other.copies)


def _divides(work: Work, tensor: int) -> bool:
    model = work.model
    groups = model.num_query_groups
    sizes = (model.num_attention_heads, model.ffn_hidden_size, work.vocab_size, work.seq_length)
    return all(size % tensor == 0 for size in sizes) and 0 in (groups % tensor, tensor % groups)


def advice(work: Work, memory: float, ceilings: Ceilings | None = None) -> list[str]:
    """What to warn of before a run: that it cannot fit, that its stages wait.

    Args:
        work: the run, or one of its phases.
        memory: of a GPU, bytes; 0: unknown.
        ceilings: rates; None leaves out what needs a time.

    Returns:
        Warnings, a line each; none if all is well.
    """
    found: list[str] = []
    if work.runtime.kernels == "torch":
        found.append("runtime.kernels: torch keeps more than the plan says, which is of fused ones")
    peak = peak_memory(work)
    need, usable = peak.kinds.total, USABLE * memory
    if memory and need > usable:
        most = max(peak.kinds.by_name().items(), key=lambda item: item[1])
        fitting = largest_micro_batch(work, usable)
        remedy = "; ".join(f"{r.text} saves {r.saved / GIB:.1f} GiB" for r in remedies(work)[:3])
        if fitting is not None:
            remedy = f"training.micro_batch_size: {fitting.micro_batch_size} fits"
        found.append(
            f"the plan says that the run does not fit: stage {peak.stage} needs "
            f"{need / GIB:.1f} GiB, most of it {most[0]} ({most[1] / GIB:.1f}), of "
            f"{usable / GIB:.1f} usable; {remedy}"
        )
    if ceilings is not None and work.parallel.pipeline > 1:
        bubble = step_time(work, ceilings).bubble
        if bubble > _LARGE_BUBBLE:
            found.append(
                f"pipeline stages wait {bubble:.0%} of a step: more micro batches (a smaller "
                "training.micro_batch_size), more parallel.virtual_stages or fewer stages wait less"
            )
    return found


def advice_for_run(
    config: RunConfig, runtime: RuntimeConfig, processes: int, memory: float, gpu: str
) -> list[str]:
    """``advice`` on the phase of a run that needs most memory.

    Args:
        config: the run.
        runtime: section ``runtime``.
        processes: of all nodes together, which must suit the layout and the batch.
        memory: of a GPU, bytes.
        gpu: its name; of one that nothing is known of, only memory is judged.
    """
    works = works_of_run(config, runtime, processes)
    fullest = max(works, key=lambda work: peak_memory(work).kinds.total)
    try:
        return advice(fullest, memory, known_ceilings(gpu))
    except UserError:
        return advice(fullest, memory)
