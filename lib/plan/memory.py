"""The most memory that a rank holds at once in a training step, by kind.

Not a sum of maxima: what is there is added up at each of a few moments of a step, and the largest
sum is the answer. Moments, of each pipeline stage:

    start     the ends of the model and a layer are being gathered; nothing is kept yet
    head      the logits and their gradient are there, and all that the last micro batch kept
    layer     backward is in the last layer of a chunk (or in the first that is computed again), or
              one or two layers further, whose gradients are on their way to the ranks that hold
              the masters
    end       the last gradients are on their way

In ``head`` and ``layer`` a stage keeps as much of other micro batches as its plan says
(``lib.pipeline.schedule``). Bytes of the state, with P parameters of a rank, R ranks that share
the masters, e bytes a number of the compute type (masters are fp32: 4):

| kind | sharding optimizer | gradients | parameters |
|---|---|---|---|
| weights | e P | e P | e (ends, and a layer or two) |
| gradients | 4 P, and 4 P / R if R > 1 | 4 P / R, and those of a layer | the same |
| optimizer: masters and two moments | 12 P / R | 12 P / R | 12 P / R |
| buffers: gradients on their way, of two blocks | 4 P of the two | and 4 P / R of them | the same |

P of the two: of the largest two blocks, each a layer or an end of the model. What a transfer sends
stays until somebody waits for it, which is when the next but one begins.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from lib.config.nearest import divisors
from lib.pipeline.schedule import Kind, training_plan
from lib.plan.activations import (
    LayerActivations,
    chunk_backward,
    chunk_kept,
    head_extra,
    head_kept,
)
from lib.plan.parameters import BlockSize, chunk_blocks
from lib.plan.work import Work

GIB = 2**30
# Of a GPU's memory; the rest is for the context, NCCL and what the allocator cannot use.
USABLE = 0.93
# cuBLAS has one for each thread that launches, the main one and that of backward: 32 MiB on
# Hopper and later (8 on older ones).
_WORKSPACES = 2 * 32 * 2**20
_REDUCTIONS = 2  # at once: lib.parallel.data_parallel.MOST_REDUCTIONS
_TOKEN_BYTES = 8 + 8 + 4  # of a batch: token, label, weight


@dataclass(frozen=True)
class Kinds:
    """Bytes by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())

    def by_name(self) -> dict[str, int]:
        """Kind to bytes."""
        return dict(vars(self))

    def __add__(self, other: "Kinds") -> "Kinds":
        """The sum, kind by kind."""
        mine, theirs = vars(self).values(), vars(other).values()
        return Kinds(*(one + two for one, two in zip(mine, theirs, strict=True)))


@dataclass(frozen=True)
class StageMemory:
    """A rank of one pipeline stage when it holds most.

    Attributes:
        stage: its number.
        moment: of the step, see the text of the module.
        in_flight: micro batches whose activations are kept at it, counted for each chunk.
        kinds: bytes.
    """

    stage: int
    moment: str
    in_flight: int
    kinds: Kinds


def stage_memories(work: Work) -> list[StageMemory]:
    """The peak of each pipeline stage."""
    return [stage_memory(work, stage) for stage in range(work.parallel.pipeline)]


def peak_memory(work: Work) -> StageMemory:
    """The stage that holds most."""
    return max(stage_memories(work), key=lambda found: found.kinds.total)


def largest_micro_batch(work: Work, usable: float) -> Work | None:
    """The work with the largest micro batch that fits and divides the batch of a copy.

    Args:
        work: whose batch, layout and recomputation stay.
        usable: bytes of a GPU.
    """
    samples = work.micro_batch_size * work.micro_batches
    fitting = None
    for size in divisors(samples):
        larger = replace(work, micro_batch_size=size, micro_batches=samples // size)
        if peak_memory(larger).kinds.total > usable:
            break
        fitting = larger
    return fitting


def stage_memory(work: Work, stage: int) -> StageMemory:
    """The peak of one pipeline stage."""
    return max(_Stage(work, stage).moments(), key=lambda found: found.kinds.total)


@dataclass(frozen=True)
class _Stage:
    work: Work
    stage: int

    @cached_property
    def layer(self) -> LayerActivations:
        return LayerActivations(self.work)

    @cached_property
    def chunks(self) -> list[int]:
        """Places in the chain of this stage's chunks."""
        return list(range(self.stage, len(self.work.layers_of_chunks), self.work.parallel.pipeline))

    @cached_property
    def blocks(self) -> list[BlockSize]:
        return [block for chunk in self.chunks for block in chunk_blocks(self.work, chunk)]

    @cached_property
    def is_first(self) -> bool:
        return self.stage == 0

    @cached_property
    def is_last(self) -> bool:
        return self.stage == self.work.parallel.pipeline - 1

    def moments(self) -> Iterator[StageMemory]:
        yield self._found("start", 0, self._start)
        for acting, kept in _in_flight(
            self.stage,
            self.work.parallel.pipeline,
            self.work.parallel.virtual_stages,
            _enough(self.work),
        ):
            yield from self._backwards(acting, kept)
        yield self._found("end", 0, self._end)

    def _found(self, moment: str, in_flight: int, more: Kinds) -> StageMemory:
        return StageMemory(self.stage, moment, in_flight, self._state + more)

    def _backwards(self, acting: int, kept: tuple[int, ...]) -> Iterator[StageMemory]:
        """The moments of one chunk's backward, while so many micro batches are kept of each."""
        work, layers = self.work, self.work.layers_of_chunks
        activations = sum(
            count * chunk_kept(self.layer, layers[chunk])
            for count, chunk in zip(kept, self.chunks, strict=True)
        )
        chunk = self.chunks[acting]
        if chunk == 0:  # dropout of the embeddings
            activations += kept[acting] * self.layer.hidden_mask
        more = Kinds(activations=activations, gradients=self._gathered_gradients(chunk))
        if chunk == len(layers) - 1:
            norm, logits = head_kept(work)
            buffers = head_extra(work) + self._on_their_way(chunk, 0)
            head = Kinds(activations=norm, logits=logits, buffers=buffers)
            yield self._found("head", sum(kept), more + head)
        reduces = work.sharding != "optimizer" or sum(kept) == 1  # each micro batch, or the last
        for done in range(min(layers[chunk], 1 + (_REDUCTIONS if reduces else 0))):
            left = layers[chunk] - done
            gone = chunk_kept(self.layer, layers[chunk]) - chunk_kept(self.layer, left)
            beside = Kinds(
                activations=chunk_backward(self.layer, left) - gone,
                buffers=self._on_their_way(chunk, done),
            )
            yield self._found("layer", sum(kept), more + beside)

    @cached_property
    def _state(self) -> Kinds:
        """What is there during all of a step."""
        work, blocks = self.work, self.blocks
        values = sum(block.values for block in blocks)
        lasting = sum(block.values for block in blocks if block.lasts)
        sums = sum(block.width for block in blocks if block.has_own_sum)
        frees_values = work.sharding == "parameters"
        whole = values if work.sharding == "optimizer" else 0
        return Kinds(
            weights=work.element_bytes * (lasting if frees_values else values),
            gradients=work.master_bytes * (whole + sums),
            optimizer=3 * work.master_bytes * sum(block.width for block in blocks),
            buffers=_WORKSPACES + self._batches + self._gathered_layer,
        )

    @cached_property
    def _batches(self) -> int:
        """A step's tokens, the table of positions, and what goes to and comes from neighbours."""
        work = self.work
        tokens = _TOKEN_BYTES * work.tokens * work.micro_batches
        table = 4 * work.seq_length * work.model.head_dim
        rotary = table if work.model.position_embedding == "rope" else 0
        # Posted and sent hidden states; the gradient that backward begins with is counted there.
        transfers = 0
        if work.parallel.pipeline > 1:
            transfers = (0 if self.is_first else 2) + (0 if self.is_last else 1)
            if work.parallel.virtual_stages > 1:
                transfers = 3
        return tokens + rotary + transfers * self.layer.hidden

    @cached_property
    def _gathered_layer(self) -> int:
        """A layer's parameters, and the next one's on their way, where each use gathers them."""
        if self.work.sharding != "parameters":
            return 0
        layer = max((block for block in self.blocks if not block.lasts), key=lambda b: b.values)
        return self.work.element_bytes * (layer.values + self._gather_width(layer))

    def _gather_width(self, block: BlockSize) -> int:
        return block.width * (1 + self.work.shards)

    @cached_property
    def _start(self) -> Kinds:
        """The ends of the model on their way to this rank, and a layer if it is to stay."""
        if self.work.shards == 1:
            return Kinds()
        layers = [self._gather_width(block) for block in self.blocks if not block.lasts]
        ends = [self._gather_width(block) for block in self.blocks if block.lasts]
        layer = 0 if self.work.sharding == "parameters" else max(layers, default=0)
        return Kinds(buffers=self.work.element_bytes * (sum(ends) + layer))

    def _sent(self, blocks: Sequence[BlockSize], count: int) -> int:
        """Gradients of so many layers on their way to the masters, and sums that come back.

        The first sum of a step is taken in its own place.
        """
        work = self.work
        if work.shards == 1:
            return 0
        adds = work.sharding != "optimizer" and work.micro_batches > 1
        width = sum(sorted((block.width for block in blocks), reverse=True)[:count])
        return work.master_bytes * width * (work.shards + adds)

    def _on_their_way(self, chunk: int, done: int) -> int:
        """What is sent when so many layers of a chunk's micro batch are through backward."""
        if self.work.sharding != "optimizer" and self.work.micro_batches > 1:
            return self._sent(self.blocks, _REDUCTIONS)  # at first of the micro batch before
        return self._sent(chunk_blocks(self.work, chunk), done)

    def _gathered_gradients(self, chunk: int) -> int:
        """Gradients of a micro batch that are not reduced yet, where they do not stay."""
        if self.work.sharding == "optimizer":
            return 0
        here = chunk_blocks(self.work, chunk)
        lasting = sum(block.values for block in here if block.lasts)
        layer = max((block.values for block in here if not block.lasts), default=0)
        return self.work.master_bytes * (lasting + layer)

    @cached_property
    def _end(self) -> Kinds:
        return Kinds(activations=self.layer.hidden, buffers=self._sent(self.blocks, _REDUCTIONS))


def _enough(work: Work) -> int:
    """So many micro batches that more would not be kept at once; the order of groups the same."""
    stages, count = work.parallel.pipeline, work.micro_batches
    few = 4 * stages
    return few if count > few and count % stages == 0 else count


@lru_cache(maxsize=4096)
def _in_flight(
    stage: int, stages: int, chunks: int, micro_batches: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """At each backward, its chunk and how many micro batches of each chunk are kept; each once."""
    kept: Counter[int] = Counter()
    found: dict[tuple[int, tuple[int, ...]], None] = {}
    for action in training_plan(stage, stages, chunks, micro_batches):
        if action.kind is Kind.FORWARD:
            kept[action.chunk] += 1
            continue
        found[action.chunk, tuple(kept[chunk] for chunk in range(chunks))] = None
        kept[action.chunk] -= 1
    most: dict[tuple[int, tuple[int, ...]], None] = {}
    for acting, counts in found:  # what another one exceeds in every chunk is no peak
        others = [c for a, c in found if a == acting and c != counts]
        if not any(all(x <= y for x, y in zip(counts, c, strict=True)) for c in others):
            most[acting, counts] = None
    return tuple(most)
