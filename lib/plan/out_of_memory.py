"""Why a run died of memory, and what would help: from torch's message and the plan of the run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lib.plan.memory import GIB, stage_memory
from lib.plan.remedies import remedies
from lib.plan.work import Work

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"


@dataclass(frozen=True)
class Exhausted:
    """What torch says when memory is out, in bytes; 0 where it does not say.

    Attributes:
        wanted: by the request that failed.
        capacity: of the GPU.
        allocated: held by tensors of this process.
        unused: reserved by torch, but of no tensor.
        others: used by other processes on the same GPU, by their numbers.
    """

    wanted: int = 0
    capacity: int = 0
    allocated: int = 0
    unused: int = 0
    others: tuple[tuple[int, int], ...] = ()


def parse(message: str) -> Exhausted:
    """Reads the text of a ``torch.OutOfMemoryError``."""
    others = re.findall(rf"Process (\d+) has {_SIZE} memory in use", message)
    return Exhausted(
        wanted=_size(rf"Tried to allocate {_SIZE}", message),
        capacity=_size(rf"total capacity of {_SIZE}", message),
        allocated=_size(rf"{_SIZE} is allocated by PyTorch", message),
        unused=_size(rf"{_SIZE} is reserved by PyTorch but unallocated", message),
        others=tuple((int(pid), _bytes(number, unit)) for pid, number, unit in others),
    )


def _size(pattern: str, message: str) -> int:
    found = re.search(pattern, message)
    return 0 if found is None else _bytes(found[1], found[2])


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def explain(works: Sequence[Work], stage: int, message: str) -> list[str]:
    """What filled the memory, and the remedies, a line each.

    Args:
        works: the phases of the run; the one that needs most on this stage is explained.
        stage: the pipeline stage of the rank that died.
        message: torch's.
    """
    plans = [stage_memory(work, stage) for work in works]
    phase, plan = max(enumerate(plans), key=lambda each: each[1].kinds.total)
    found = parse(message)
    kinds = sorted(plan.kinds.by_name().items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in kinds if size)
    lines: list[str] = []
    if found.wanted:  # cuBLAS and NCCL say no figures
        lines.append(
            f"out of memory: {_gib(found.wanted)} more were wanted of {_gib(found.capacity)}, of "
            f"which tensors held {_gib(found.allocated)}"
        )
    lines.append(
        f"stage {stage} needs {plan.kinds.total / GIB:.1f} GiB by plan, most of it {kinds[0][0]} "
        f"({parts}), at its fullest moment ({plan.moment})"
    )
    lines += [
        f"process {pid} on the same GPU holds {_gib(size)}: end it, or leave it the GPU"
        for pid, size in found.others
    ]
    lines += [f"{each.text} saves {each.saved / GIB:.1f} GiB" for each in remedies(works, phase)]
    if found.unused:
        lines.append(f"{_ALLOCATOR} may give back of the {_gib(found.unused)} that lie in pieces")
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
