"""Runs the plans of all stages on paper: proves that they fit together and says what they cost.

The transport is that of the executor. Each pair of neighbours in the ring of stages has one
channel for activations, stage r to r + 1, and one for gradients, r to r - 1. A channel is first in
first out, a send never blocks, and a receiver takes its messages in the order of its own plan. So
two things prove that a schedule runs: on every channel messages are sent in the order in which
they are taken, and the graph of actions (the order of each plan, and for each action the one that
makes its input) has no cycle.

An action starts when its stage is free and its input is there: the forward of slab g needs that
of slab g - 1, the backward of slab g that of slab g + 1 and its own forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lib.pipeline.schedule import Action, Kind

Plans = Sequence[Sequence[Action]]


class UnsoundPlan(ValueError):
    """Plans that do not do the work of a step, or wait for ever. The message names the place."""


@dataclass(frozen=True)
class Costs:
    """How long things take, in any unit of time.

    Attributes:
        forward: of each slab of layers, in order of depth.
        backward: the same for backwards.
        transfer: from the end of an action until its output is at the neighbour; computing goes
            on meanwhile.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def uniform(
        cls, slabs: int, *, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0
    ) -> "Costs":
        """The same for each of so many slabs (stages x chunks)."""
        return cls((forward,) * slabs, (backward,) * slabs, transfer)


@dataclass(frozen=True)
class Span:
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        stages: what each stage did, in order.
    """

    stages: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last stage is done; the first one starts at 0."""
        return max((span.end for spans in self.stages for span in spans), default=0.0)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each stage, the share of the makespan in which it waits."""
        whole = self.makespan or 1.0
        return tuple(
            1 - sum(span.end - span.start for span in spans) / whole for spans in self.stages
        )

    @property
    def bubble_share(self) -> float:
        """Share of the makespan in which a stage waits, averaged over the stages."""
        return sum(self.idle_shares) / len(self.stages)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each stage, the most forwards of one chunk that wait for their backward at once.

        0 where there are no backwards: nothing is kept then.
        """
        return tuple(_most_in_flight([span.action for span in spans]) for spans in self.stages)


def bubble_formula(stages: int, chunks: int, micro_batches: int) -> float:
    """The bubble share of ``training_plan`` in closed form, for slabs of equal cost.

    Counted in times of forward and backward of one chunk, a stage works micro_batches * chunks and
    waits stages - 1; with fewer micro batches than stages, also (chunks - 1) * (stages -
    micro_batches). Transfers count as free.
    """
    waits = stages - 1 + (chunks - 1) * max(0, stages - micro_batches)
    return waits / (micro_batches * chunks + waits)


def simulate(plans: Plans, costs: Costs) -> Timeline:
    """Runs one plan per stage.

    Args:
        plans: of every stage, by its number.
        costs: for as many slabs as the plans have.

    Raises:
        UnsoundPlan: a plan does not do the work of a step, a channel's messages are taken in
            another order than they are sent, or stages wait for each other for ever.
    """
    check_work(plans)
    check_channels(plans)
    depth = len(plans) * _count_chunks(plans)
    assert len(costs.forward) == len(costs.backward) == depth
    ends: dict[tuple[Kind, int, int], float] = {}  # by kind, micro batch and slab
    spans: list[list[Span]] = [[] for _ in plans]
    advanced = True
    while advanced:
        advanced = False
        for stage, plan in enumerate(plans):
            for action in plan[len(spans[stage]) :]:
                slab = action.chunk * len(plans) + stage
                source = _source(action.kind, slab, depth)
                arrival = 0.0
                if source is not None:
                    key = (action.kind, action.micro_batch, source)
                    if key not in ends:
                        break
                    arrival = ends[key] + (costs.transfer if len(plans) > 1 else 0.0)
                start = max(arrival, spans[stage][-1].end if spans[stage] else 0.0)
                took = costs.forward if action.kind is Kind.FORWARD else costs.backward
                spans[stage].append(Span(action, start, start + took[slab]))
                ends[action.kind, action.micro_batch, slab] = start + took[slab]
                advanced = True
    _check_finished(plans, [len(done) for done in spans])
    return Timeline(tuple(tuple(done) for done in spans))


def check_work(plans: Plans) -> None:
    """Checks that each stage does a step's work once.

    Every micro batch goes through every chunk forward once and, unless the plans have no
    backwards, backward once after that; ``last_backward`` marks each chunk's last backward.

    Raises:
        UnsoundPlan: otherwise.
    """
    actions = [action for plan in plans for action in plan]
    trains = any(action.kind is Kind.BACKWARD for action in actions)
    micro_batches = max((action.micro_batch + 1 for action in actions), default=0)
    chunks = range(_count_chunks(plans))
    wanted = {(number, chunk) for number in range(micro_batches) for chunk in chunks}
    for stage, plan in enumerate(plans):
        forward: set[tuple[int, int]] = set()
        backward: set[tuple[int, int]] = set()
        for action in plan:
            place = (action.micro_batch, action.chunk)
            done = forward if action.kind is Kind.FORWARD else backward
            if place in done:
                raise UnsoundPlan(f"stage {stage}: {action} comes twice")
            if done is backward and place not in forward:
                raise UnsoundPlan(f"stage {stage}: {action} comes before its forward")
            done.add(place)
        missing = (wanted - forward) | (wanted - backward if trains else set())
        if missing:
            number, chunk = min(missing)
            raise UnsoundPlan(f"stage {stage}: micro batch {number} of chunk {chunk} is left out")
        for chunk in chunks if trains else ():
            marks = [a.last_backward for a in plan if a.kind is Kind.BACKWARD and a.chunk == chunk]
            if marks != [False] * (micro_batches - 1) + [True]:
                raise UnsoundPlan(f"stage {stage}: chunk {chunk} marks another last backward")


def check_channels(plans: Plans) -> None:
    """Checks that messages are taken from every channel in the order in which they are sent.

    Raises:
        UnsoundPlan: otherwise, with the first message that differs.
    """
    stages = len(plans)
    if stages == 1:
        return  # nothing is sent: chunks of one stage hand over directly
    depth = stages * _count_chunks(plans)
    for kind, name, step in ((Kind.FORWARD, "activations", 1), (Kind.BACKWARD, "gradients", -1)):
        last = depth - 1 if kind is Kind.FORWARD else 0
        for sender, plan in enumerate(plans):
            receiver = (sender + step) % stages
            slabs = _slabs(plan, kind, sender, stages)
            sent = [(number, slab) for number, slab in slabs if slab != last]
            taken = [
                (number, slab - step)
                for number, slab in _slabs(plans[receiver], kind, receiver, stages)
                if slab != depth - 1 - last
            ]
            for place, (one, other) in enumerate(zip_longest(sent, taken)):
                if one != other:
                    raise UnsoundPlan(
                        f"{name} from stage {sender} to stage {receiver}, message {place}: "
                        f"sent is {_message(one)}, wanted is {_message(other)}"
                    )


def _slabs(plan: Sequence[Action], kind: Kind, stage: int, stages: int) -> list[tuple[int, int]]:
    """Micro batch and slab of the plan's actions of a kind, in order."""
    return [(a.micro_batch, a.chunk * stages + stage) for a in plan if a.kind is kind]


def _message(message: tuple[int, int] | None) -> str:
    return f"micro batch {message[0]} of slab {message[1]}" if message else "nothing"


def _source(kind: Kind, slab: int, depth: int) -> int | None:
    """The slab whose action of the same kind gives the input; None at the model's ends."""
    source = slab - 1 if kind is Kind.FORWARD else slab + 1
    return source if 0 <= source < depth else None


def _count_chunks(plans: Plans) -> int:
    return max((action.chunk + 1 for plan in plans for action in plan), default=1)


def _most_in_flight(actions: list[Action]) -> int:
    if all(action.kind is Kind.FORWARD for action in actions):
        return 0
    now, most = 0, 0
    for action in actions:
        now += 1 if action.kind is Kind.FORWARD else -1
        most = max(most, now)
    return most


def _check_finished(plans: Plans, done: list[int]) -> None:
    """Raises if a stage has actions left, with what each of these stages waits for."""
    depth = len(plans) * _count_chunks(plans)
    waits: list[str] = []
    for stage, (plan, count) in enumerate(zip(plans, done, strict=True)):
        if count == len(plan):
            continue
        action = plan[count]
        source = _source(action.kind, action.chunk * len(plans) + stage, depth)
        assert source is not None, "an action without input never waits"
        chunk, other = divmod(source, len(plans))
        wanted = Action(action.kind, action.micro_batch, chunk)
        waits.append(
            f"stage {stage} at its action {count}, {action}, for {wanted} of stage {other}"
        )
    if waits:
        raise UnsoundPlan("these stages wait for ever: " + "; ".join(waits))
