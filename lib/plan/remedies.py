"""What to change where a run does not fit, and what each change saves; and the warning of it.

The warning has the form of a rule (``lib.config.rule``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lib.config.nearest import divisors
from lib.config.params_problems import show
from lib.config.rule import Rule
from lib.errors import Problem
from lib.plan.memory import GIB, USABLE, largest_micro_batch, peak_memory
from lib.plan.work import Work

_SHOWN = 3
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


def remedies(works: Sequence[Work], phase: int = 0) -> list[Remedy]:
    """The changes that save memory in a phase, those with the least side effects first.

    In this order: micro batch, recomputation, sequence, sharding, sequence parallelism, tensor and
    pipeline parallelism (over as many ranks, so with fewer copies, or over more). Those that save
    less than a hundredth are left out. What is named breaks no rule.

    Args:
        works: the phases of a run.
        phase: the one that needs too much.
    """
    now = peak_memory(works[phase]).kinds.total
    changes = (*_batch_changes(works, phase), *_layout_changes(works, phase))
    found = [Remedy(text, now - peak_memory(other).kinds.total) for text, other in changes]
    return [remedy for remedy in found if remedy.saved >= now / 100]


def _batch_changes(works: Sequence[Work], phase: int) -> Iterator[tuple[str, Work]]:
    """Smaller micro batches, recomputation, shorter samples."""
    work = works[phase]
    if work.micro_batch_size > 1:
        size = divisors(work.micro_batch_size)[-2]
        count = work.micro_batches * (work.micro_batch_size // size)
        other = replace(work, micro_batch_size=size, micro_batches=count)
        yield f"{_key(works, phase, 'micro_batch_size')}: {size}", other
    modes = {"none": ["selective", "full"], "selective": ["full"], "full": []}
    for mode in modes[work.runtime.recompute]:
        runtime = work.runtime.model_copy(update={"recompute": mode})
        yield f"runtime.recompute: {mode}", replace(work, runtime=runtime)
    length, parallel = work.seq_length // 2, work.parallel
    if length and not (parallel.sequence and length % parallel.tensor):
        yield f"{_key(works, phase, 'seq_length')}: {length}", replace(work, seq_length=length)


def _layout_changes(works: Sequence[Work], phase: int) -> Iterator[tuple[str, Work]]:
    """Finer sharding, and other layouts, which all phases must admit."""
    work, parallel = works[phase], works[phase].parallel
    if work.shards > 1 and parallel.sharding in _NEXT_SHARDING:
        yield _laid(work, sharding=_NEXT_SHARDING[parallel.sharding])
    shares = all(each.seq_length % parallel.tensor == 0 for each in works)
    if parallel.tensor > 1 and not parallel.sequence and shares:
        yield _laid(work, sequence=True)
    tensor, stages = 2 * parallel.tensor, 2 * parallel.pipeline
    copies = work.copies // 2 if work.copies % 2 == 0 else work.copies
    fewer = {"data": copies, "data_shard": None}
    if all(_divides(each, tensor) for each in works):
        yield _laid(work, tensor=tensor, sequence=True, **fewer)
    if stages * parallel.virtual_stages <= work.model.num_layers:
        yield _laid(work, pipeline=stages, layers_per_chunk=None, **fewer)


def _laid(work: Work, **changes: object) -> tuple[str, Work]:
    """The work on another layout, its global batch the same, and what to write for it."""
    other = replace(work, parallel=work.parallel.model_copy(update=changes))
    other = replace(other, micro_batches=work.micro_batches * work.copies // other.copies)
    first, *rest = [
        f"{key}: {show(value)}"
        for key, value in changes.items()
        if getattr(work.parallel, key) != value
    ]
    text = f"parallel.{first}" + (f" with {', '.join(rest)}" if rest else "")
    return text + ("" if other.ranks == work.ranks else f" on {other.ranks} GPUs"), other


def _divides(work: Work, tensor: int) -> bool:
    model = work.model
    groups = model.num_query_groups
    sizes = (model.num_attention_heads, model.ffn_hidden_size, work.vocab_size, work.seq_length)
    return all(size % tensor == 0 for size in sizes) and 0 in (groups % tensor, tensor % groups)


def _key(works: Sequence[Work], phase: int, name: str) -> str:
    """Where the file says a size: a phase that says nothing has that of the one before."""
    sizes: list[int] = [getattr(work, name) for work in works]
    while phase and sizes[phase - 1] == sizes[phase]:
        phase -= 1
    section = f"data.phases[{phase - 1}]" if phase else "training"
    return f"{section}.{name}"


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
        _key(works, phase, "micro_batch_size"),
        str(work.micro_batch_size),
        f"the run does not fit by plan: {place}stage {peak.stage} needs {need / GIB:.1f} GiB, most "
        f"of it {kind} ({most / GIB:.1f}), of {usable / GIB:.1f} that tensors may take of a GPU's "
        f"{gpu_memory / GIB:.1f}",
        "; ".join(_first_remedies(works, phase, usable)) or "take larger GPUs or a smaller model",
    )


PLAN_ADVICE: tuple[Rule, ...] = (run_fits_the_gpus,)


def _first_remedies(works: Sequence[Work], phase: int, usable: float) -> list[str]:
    """The first few, and the first that is enough; of micro batches the largest that fits."""
    need, found = peak_memory(works[phase]).kinds.total, remedies(works, phase)
    if (fitting := largest_micro_batch(works[phase], usable)) is not None:
        key = _key(works, phase, "micro_batch_size")
        saved = need - peak_memory(fitting).kinds.total
        largest = Remedy(f"{key}: {fitting.micro_batch_size}", saved)
        found = [largest, *(each for each in found if not each.text.startswith(key))]
    enough = next((each for each in found if need - each.saved <= usable), None)
    shown = found[:_SHOWN]
    if enough is not None and enough not in shown:
        shown.append(enough)
    return [
        f"{each.text} saves {each.saved / GIB:.1f} GiB"
        + (", and fits" if need - each.saved <= usable else "")
        for each in shown
    ]
