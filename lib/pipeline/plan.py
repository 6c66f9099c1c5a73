"""What the executor runs: a schedule with the moments at which each input begins to be received.

On a GPU a transfer is a kernel that waits for the other end, and CUDA promises no progress beside
it: loading a kernel for the first time or growing a memory pool may wait until everything on the
device is done. So in the worst case a stage stands still from the posting of a receive until its
message is there, and from a send until its receive is posted. A receive that is posted too early
(one ahead, say) can wait for a message that depends on what the stage was about to do; one that is
posted only when it is needed can hold up a sender for which the receiver waits in turn, as in the
interleaved schedule, where messages lie about for a while.

Here a receive is posted before the first action that starts, on paper (``lib.pipeline.simulate``),
once the message is made. Then nothing waits for anything later than itself: a posted receive waits
for a message that was made before, and a sender's next action starts no earlier than the message
was made, so that the receiver, in order of these times, reaches the posting without it. Hence no
deadlock, whatever the device serialises, and one open send a channel is enough. (Tests run the
plans over wires without any buffer, on which every wait is real.)
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lib.pipeline.schedule import Action, Kind, forward_only, training_plan
from lib.pipeline.simulate import Costs, Plans, simulate


def stage_plan(
    stage: int, stages: int, chunks: int, micro_batches: int, *, trains: bool
) -> Sequence[Action]:
    """The plan of one stage for a step, or for a measurement of the loss.

    Args:
        stage: this stage.
        stages: pipeline stages.
        chunks: chunks of each.
        micro_batches: of the step; any number.
        trains: whether there are backwards.
    """
    return _all_plans(stages, chunks, micro_batches, trains)[stage]


@lru_cache(maxsize=16)  # the sizes of a ramp-up and of validation
def _all_plans(
    stages: int,
    chunks: int,
    micro_batches: int,
    trains: bool,
) -> tuple[tuple[Action, ...], ...]:
    plans = [
        training_plan(stage, stages, chunks, micro_batches)
        if trains
        else forward_only(micro_batches, stages, chunks)
        for stage in range(stages)
    ]
    return with_posts(plans)


def with_posts(plans: Plans) -> tuple[tuple[Action, ...], ...]:
    """The plans of all stages with the moments at which their inputs begin to be received."""
    stages = len(plans)
    chunks = max((action.chunk + 1 for plan in plans for action in plan), default=1)
    last = stages * chunks - 1
    timeline = simulate(plans, Costs.uniform(last + 1))
    made = {
        (span.action.kind, span.action.micro_batch, span.action.chunk * stages + stage): span.end
        for stage, spans in enumerate(timeline.stages)
        for span in spans
    }
    complete = []
    for stage, spans in enumerate(timeline.stages):
        starts = [span.start for span in spans]
        posts: list[list[tuple[float, tuple[Kind, int, int]]]] = [[] for _ in spans]
        for span in spans:
            action = span.action
            slab = action.chunk * stages + stage
            source = slab - 1 if action.kind is Kind.FORWARD else slab + 1
            if stages > 1 and 0 <= source <= last:
                time = made[action.kind, action.micro_batch, source]
                place = (action.kind, action.micro_batch, action.chunk)
                posts[bisect_left(starts, time)].append((time, place))
        complete.append(
            tuple(
                replace(span.action, posts=tuple(place for _, place in sorted(due, key=_time)))
                for span, due in zip(spans, posts, strict=True)
            )
        )
    return tuple(complete)


def _time(post: tuple[float, tuple[Kind, int, int]]) -> float:
    return post[0]
