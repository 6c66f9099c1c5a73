"""All layouts of a model over N GPUs, the fastest first, and why the others fall out.

Tensor parallelism stays within a node and shares the sequence too. What saves memory at a price in
time (recomputation, finer sharding) is taken only where the layout does not fit without: of all
such choices the one that is expected to be the fastest.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lib.config.data_section import DataSection
from lib.config.nearest import divisors
from lib.config.operation import RuntimeConfig
from lib.config.rules import broken_rules
from lib.config.run_config import Params
from lib.config.schema import ParallelConfig, TrainingSection
from lib.errors import UserError
from lib.plan.ceilings import Ceilings
from lib.plan.memory import GIB, USABLE, StageMemory, peak_memory
from lib.plan.time import StepTime, step_time
from lib.plan.work import Work, works_of

_MOST_CHUNKS = 4  # of a stage
# Of a layout's best rate: less is not expected of a plan, while larger micro batches need memory.
_AS_FAST = 0.98
_NUMBER = re.compile(r"\d+")
_SHARDINGS = ("optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Machines:
    """What a run may have.

    Attributes:
        gpus: in all.
        gpus_per_node: of each node.
        memory: of a GPU, bytes.
        ceilings: of a GPU.
    """

    gpus: int
    gpus_per_node: int
    memory: float
    ceilings: Ceilings

    @property
    def usable(self) -> float:
        """Bytes that tensors may take of a GPU."""
        return USABLE * self.memory


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        work: with its layout.
        memory: of the fullest stage.
        time: of a step.
    """

    work: Work
    memory: StageMemory
    time: StepTime


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        ranked: each layout that fits with the smallest micro batch that is about as fast as any
            (2 %), by expected tokens/s.
        fallen: how many layouts fell out, by reason, the most first; of reasons that differ in
            numbers only, the first one's.
    """

    ranked: list[Candidate]
    fallen: list[tuple[str, int]]


def search(params: Params, runtime: RuntimeConfig, vocab_size: int, machines: Machines) -> Found:
    """Ranks all layouts.

    Args:
        params: whose model, batches and longest phase count; its layout does not.
        runtime: whose attention and kernels count.
        vocab_size: real tokens.
        machines: to lay the run over.
    """
    fallen: Counter[str] = Counter()
    examples: dict[str, str] = {}
    ranked: list[Candidate] = []
    for layout in _layouts(machines):
        laid = replace(params, parallel=layout)
        reason, best = _best(laid, runtime, vocab_size, machines)
        if best is None:
            kind = _NUMBER.sub("N", reason)
            fallen[examples.setdefault(kind, reason)] += 1
        else:
            ranked.append(best)
    ranked.sort(key=lambda found: -found.time.tokens_per_second)
    return Found(ranked, fallen.most_common())


def _layouts(machines: Machines) -> Iterator[ParallelConfig]:
    gpus = machines.gpus
    for tensor in divisors(machines.gpus_per_node):
        for pipeline in divisors(gpus // tensor) if gpus % tensor == 0 else []:
            for chunks in range(1, _MOST_CHUNKS + 1 if pipeline > 1 else 2):
                data = gpus // tensor // pipeline
                for shard in _shards(data, machines, tensor):
                    yield ParallelConfig(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        sequence=tensor > 1,
                        virtual_stages=chunks,
                        data_shard=shard,
                    )


def _shards(data: int, machines: Machines, tensor: int) -> list[int | None]:
    """All copies share the state, or those of a node do."""
    near = machines.gpus_per_node // tensor
    return [None, near] if 1 < near < data and data % near == 0 else [None]


def _best(
    params: Params, runtime: RuntimeConfig, vocab_size: int, machines: Machines
) -> tuple[str, Candidate | None]:
    """The smallest micro batch of a layout that is as fast as any, or why there is none."""
    layout = params.parallel
    training = params.training
    assert layout.data is not None
    if training.global_batch_size % layout.data:
        return f"training.global_batch_size does not divide among {layout.data} copies", None
    single = training.model_copy(update={"micro_batch_size": 1})
    sections = {"model": params.model, "parallel": layout, "training": single, "data": params.data}
    if problems := broken_rules(sections | {"vocab_size": vocab_size}):
        return f"{problems[0].field}: {problems[0].rule}", None
    longest = single.model_copy(update={"seq_length": params.longest_seq_length})
    alike = replace(params, training=longest, data=DataSection(attention=params.data.attention))
    try:
        (work,) = works_of(alike, runtime, vocab_size, machines.gpus)
    except UserError as error:
        return str(error), None
    found: list[Candidate] = []
    for size in divisors(math.gcd(work.micro_batches, *_rampup(training, layout.data))):
        larger = replace(work, micro_batch_size=size, micro_batches=work.micro_batches // size)
        best = _fastest_that_fits(larger, machines)
        if best is None:
            break
        found.append(best)
    if not found:
        return _why_none_fits(work), None
    rates = [each.time.tokens_per_second for each in found]
    return "", next(
        each for each, rate in zip(found, rates, strict=True) if rate >= _AS_FAST * max(rates)
    )


def _rampup(training: TrainingSection, copies: int) -> list[int]:
    """Samples on each copy by which batches begin and grow, which micro batches divide as well."""
    sizes = (training.rampup_start_batch_size, training.rampup_increment)
    return [size // copies for size in sizes if size is not None]


def _fastest_that_fits(work: Work, machines: Machines) -> Candidate | None:
    """Of the ways to save memory the fastest with which the work fits."""
    plain = next(_ways(work))
    ways = [plain]
    if peak_memory(plain).kinds.total > machines.usable:
        ways = list(_ways(work))[1:]
    times = [(step_time(way, machines.ceilings, machines.gpus_per_node), way) for way in ways]
    # Of equal times the first, which asks least of the links.
    for time, way in sorted(times, key=lambda each: each[0].seconds):
        memory = peak_memory(way)
        if memory.kinds.total <= machines.usable:
            return Candidate(way, memory, time)
    return None


def _ways(work: Work) -> Iterator[Work]:
    shardings = _SHARDINGS if work.shards > 1 else _SHARDINGS[:1]
    for sharding, changes in product(shardings, _recomputations(work)):
        yield replace(
            work,
            parallel=work.parallel.model_copy(update={"sharding": sharding}),
            runtime=work.runtime.model_copy(update=changes),
        )


def _recomputations(work: Work) -> list[dict[str, object]]:
    """No layer again, a quarter, half or three quarters of each chunk's, or all."""
    most = max(work.layers_of_chunks)
    parts = sorted({max(1, most * quarters // 4) for quarters in (1, 2, 3)} - {most})
    found: list[dict[str, object]] = [{"recompute": "none"}]
    for method, layers in (*(("block", part) for part in parts), ("uniform", 1)):
        found.append({"recompute": "full", "recompute_method": method, "recompute_layers": layers})
    return found


def leanest(work: Work) -> Work:
    """The work with all that saves memory but another layout or micro batch."""
    return list(_ways(work))[-1]


def _why_none_fits(work: Work) -> str:
    memory = peak_memory(leanest(work))
    kinds = memory.kinds.by_name()
    most = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"does not fit with micro batches of 1, all recomputed and sharded: "
        f"{memory.kinds.total / GIB:.0f} GiB, most of it {most}"
    )
