"""Pipeline schedules as data: what one stage does, in order.

A schedule is a pure function of a stage's place and the number of micro batches; the executor
runs whatever it says, and "no pipeline" is the plan of the only stage.
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
        last_backward: whether this is the stage's last backward of the step, the one after which
            gradients are complete and may be reduced.
    """

    kind: Kind
    micro_batch: int
    last_backward: bool = False


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The 1F1B plan of one stage.

    A stage first runs min(stages - stage - 1, micro_batches) forwards (warm-up), then alternates
    one forward and one backward, then drains. At most that many plus one micro batches are in
    flight, whatever their number; the bubble is (stages - 1) / micro_batches of the work.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    plan = [Action(Kind.FORWARD, number) for number in range(warm_up)]
    for number in range(micro_batches - warm_up):
        plan.append(Action(Kind.FORWARD, warm_up + number))
        plan.append(Action(Kind.BACKWARD, number))
    plan += [
        Action(Kind.BACKWARD, number) for number in range(micro_batches - warm_up, micro_batches)
    ]
    plan[-1] = Action(Kind.BACKWARD, plan[-1].micro_batch, last_backward=True)
    return plan


def forward_only(micro_batches: int) -> list[Action]:
    """The plan of validation and evaluation: every micro batch forward, nothing kept."""
    return [Action(Kind.FORWARD, number) for number in range(micro_batches)]
