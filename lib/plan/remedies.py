"""What to change where a run does not fit, and what each change saves; and the warning of it.

The warning has the form of a rule (``lib.config.rule``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lib.config.rule import Rule
from lib.errors import Problem
from lib.plan.memory import GIB, USABLE, largest_micro_batch, peak_memory
from lib.plan.work import Work

_SHOWN = 3
_MICRO_BATCH = "training.micro_batch_size"
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
    pipeline parallelism (over as many ranks, so with fewer copies, or over more). Those that save
    less than a hundredth are left out.
    """
    now = peak_memory(work).kinds.total
    found = [Remedy(text, now - peak_memory(other).kinds.total) for text, other in _changes(work)]
    return [remedy for remedy in found if remedy.saved >= now / 100]


def _changes(work: Work) -> Iterator[tuple[str, Work]]:
    if work.micro_batch_size > 1:
        size = work.micro_batch_size // 2
        other = replace(work, micro_batch_size=size, micro_batches=2 * work.micro_batches)
        yield f"{_MICRO_BATCH}: {size}", other
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


def run_fits_the_gpus(works: Sequence[Work], gpu_memory: float) -> Iterator[Problem]:
    """What tensors take by plan should be 93 % of a GPU at most (docs/planning.md).

    Args:
        works: the phases of a run.
        gpu_memory: of the smallest GPU, bytes.
    """
    phase, work = max(enumerate(works), key=lambda item: peak_memory(item[1]).kinds.total)
    peak = peak_memory(work)
    need, usable = peak.kinds.total, USABLE * gpu_memory
    if need <= usable:
        return
    kind, most = max(peak.kinds.by_name().items(), key=lambda item: item[1])
    place = f"data.phases[{phase - 1}]: " if phase else ""
    yield Problem(
        _field_of_micro_batch(works, phase),
        str(work.micro_batch_size),
        f"the run does not fit by plan: {place}stage {peak.stage} needs {need / GIB:.1f} GiB, most "
        f"of it {kind} ({most / GIB:.1f}), of {usable / GIB:.1f} that tensors may take of a GPU's "
        f"{gpu_memory / GIB:.1f}",
        "; ".join(_first_remedies(work, need, usable)) or "take larger GPUs or a smaller model",
    )


PLAN_ADVICE: tuple[Rule, ...] = (run_fits_the_gpus,)


def _field_of_micro_batch(works: Sequence[Work], phase: int) -> str:
    """Where the file says it: a phase that says nothing has that of the one before."""
    size = works[phase].micro_batch_size
    while phase and works[phase - 1].micro_batch_size == size:
        phase -= 1
    section = f"data.phases[{phase - 1}]" if phase else "training"
    return f"{section}.micro_batch_size"


def _first_remedies(work: Work, need: int, usable: float) -> list[str]:
    """The first few, and the first that is enough; of micro batches the largest that fits."""
    found = remedies(work)
    if (fitting := largest_micro_batch(work, usable)) is not None:
        saved = need - peak_memory(fitting).kinds.total
        largest = Remedy(f"{_MICRO_BATCH}: {fitting.micro_batch_size}", saved)
        found = [largest, *(each for each in found if not each.text.startswith(_MICRO_BATCH))]
    enough = next((each for each in found if need - each.saved <= usable), None)
    shown = found[:_SHOWN]
    if enough is not None and enough not in shown:
        shown.append(enough)
    return [
        f"{each.text} saves {each.saved / GIB:.1f} GiB"
        + (", and fits" if need - each.saved <= usable else "")
        for each in shown
    ]
