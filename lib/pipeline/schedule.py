"""Pipeline schedules as data: what one stage does, in order.

A schedule is a pure function of a stage's place and the number of micro batches; the executor
runs whatever it says, and "no pipeline" is the plan of the only stage. ``lib.pipeline.simulate``
runs the plans of all stages together on paper.

A pipeline has P stages of V chunks each. The model is cut into P x V slabs of layers, and chunk c
of stage r holds slab c * P + r (Megatron's round robin): a micro batch goes V times around the
ring of stages. Slab 0 holds the embedding, the last one the head and the loss. m is the number of
micro batches of a step, t the time of forward and backward through all chunks of a stage.

| schedule    | idle time of a stage, m >= P | activations that stage r keeps, in chunks |
|-------------|------------------------------|-------------------------------------------|
| 1F1B        | (P - 1) t                    | min(P - r, m)                             |
| interleaved | (P - 1) t / V                | min(2 (P - r - 1) + (V - 1) g + 1, m V)   |

g is the group size, see ``group_size``.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does to a micro batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One step of a plan.

    Attributes:
        kind: forward or backward.
        micro_batch: number of the micro batch within the step.
        chunk: which of the stage's chunks.
        last_backward: whether this is the chunk's last backward of the step, the one after which
            its gradients are complete and may be reduced.
        posts: kind, micro batch and chunk of the actions of this stage, this one or later ones,
            whose input begins to be received before this one runs; see ``lib.pipeline.plan``.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    last_backward: bool = False
    posts: tuple[tuple["Kind", int, int], ...] = ()

    def __str__(self) -> str:
        """Kind, micro batch and chunk, such as ``F3.1``."""
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}"


def training_plan(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    """The plan of a training step: 1F1B for one chunk per stage, interleaved for several.

    Any number of micro batches is admitted.
    """
    if chunks == 1:
        return one_forward_one_backward(stage, stages, micro_batches)
    return interleaved(stage, stages, chunks, micro_batches)


def forward_only(micro_batches: int, stages: int = 1, chunks: int = 1) -> list[Action]:
    """The plan of validation and evaluation: every micro batch forward, nothing kept.

    It is the same for every stage.
    """
    return _forwards(micro_batches, chunks, group_size(stages, micro_batches))


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The 1F1B plan of one stage.

    A stage first runs min(stages - stage - 1, micro_batches) forwards (warm-up), then alternates
    one forward and one backward, then drains. At most that many plus one micro batches are in
    flight, whatever their number; the bubble is (stages - 1) / micro_batches of the work.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    forwards = _forwards(micro_batches, 1, group=1)
    return _alternate(forwards, _backwards(forwards, micro_batches, 1), warm_up)


def interleaved(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    """The interleaved plan of one stage (Megatron's ``with_interleaving``).

    Micro batches come in groups. A group goes through chunk 0 of the stage, then through chunk 1,
    and so on, before the next group starts; backwards take the same order with the chunks from
    last to first. A stage runs 2 (stages - stage - 1) + (chunks - 1) * group forwards first: it
    has to see a whole group through all its chunks but the last, and a backward comes back from
    the last stage twice as late as there are stages in between. Then it alternates and drains.

    The bubble is that of 1F1B divided by the number of chunks, for more activations and for
    ``chunks`` times the transfers. With fewer micro batches than stages a stage also waits for
    its own output to come around, (chunks - 1) * (stages - micro_batches) chunk times; the step
    is still never longer than with 1F1B.
    """
    group = group_size(stages, micro_batches)
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * group, chunks * micro_batches)
    forwards = _forwards(micro_batches, chunks, group)
    return _alternate(forwards, _backwards(forwards, micro_batches, chunks), warm_up)


def group_size(stages: int, micro_batches: int) -> int:
    """How many micro batches go through a chunk before the stage turns to its next one.

    Stage 0 gets the input of its chunk 1 from the last stage, which has it only ``stages`` slots
    after the micro batch entered. So every group, the last and incomplete one too, needs at least
    ``stages`` micro batches: with fewer, stages idle once per chunk, and with three stages or
    more some wait for each other for ever. Activations grow with the group, so this is the
    smallest g in [stages, micro_batches] with micro_batches % g == 0 or >= stages. All micro
    batches in one group always fit, and are the only choice when they are fewer than the stages.
    """
    for size in range(stages, micro_batches):
        if micro_batches % size == 0 or micro_batches % size >= stages:
            return size
    return max(1, micro_batches)


def _forwards(micro_batches: int, chunks: int, group: int) -> list[Action]:
    """All forwards: group after group, in each one chunk after chunk."""
    return [
        Action(Kind.FORWARD, number, chunk)
        for start in range(0, micro_batches, group)
        for chunk in range(chunks)
        for number in range(start, min(start + group, micro_batches))
    ]


def _backwards(forwards: list[Action], micro_batches: int, chunks: int) -> list[Action]:
    """The backwards in the order of the forwards, the chunks from last to first."""
    return [
        Action(
            Kind.BACKWARD,
            forward.micro_batch,
            chunks - 1 - forward.chunk,
            last_backward=forward.micro_batch == micro_batches - 1,
        )
        for forward in forwards
    ]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """First ``warm_up`` forwards, then a forward and a backward in turn, then the rest."""
    plan = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        plan += [forward, backward]
    return plan + backwards[len(forwards) - warm_up :]
