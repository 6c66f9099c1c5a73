"""Receives are posted such that no two stages wait for each other, whatever is serialised."""

import pytest

from lib.pipeline.plan import stage_plan, with_posts
from lib.pipeline.schedule import Kind, forward_only, training_plan


def strict_run(plans, chunks):
    """Runs plans where nothing overlaps: which stages finish.

    A stage posts the receives that are due at an action, and its input if it is not posted yet.
    It then stands still until every message it posted for has been sent, and until every message
    it sent has been posted for: as if the device ran one thing after the other.
    """
    stages, last = len(plans), len(plans) * chunks - 1
    sent, posted = set(), set()
    waits_for = [[] for _ in plans]  # messages sent and not yet known to be posted for
    place, advanced = [0] * stages, True
    while advanced:
        advanced = False
        for stage, plan in enumerate(plans):
            while place[stage] < len(plan):
                action = plan[place[stage]]
                needs, gives = _messages(action, stage, stages, last)
                due = [
                    (kind, number, chunk * stages + stage) for kind, number, chunk in action.posts
                ]
                posted.update(due if needs is None else [*due, needs])
                mine = {m for m in posted if m[2] % stages == stage}
                waits_for[stage] = [m for m in waits_for[stage] if m not in posted]
                if waits_for[stage] or not mine <= sent:
                    break
                if gives is not None:
                    sent.add(gives)
                    waits_for[stage].append(gives)
                place[stage] += 1
                advanced = True
    return [place[stage] == len(plan) for stage, plan in enumerate(plans)]


def _messages(action, stage, stages, last):
    """The message an action needs and the one it gives, named by where it goes."""
    slab, step = action.chunk * stages + stage, 1 if action.kind is Kind.FORWARD else -1
    first, end = (0, last) if action.kind is Kind.FORWARD else (last, 0)
    needs = None if slab == first else (action.kind, action.micro_batch, slab)
    gives = None if slab == end else (action.kind, action.micro_batch, slab + step)
    return needs, gives


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("stages", "chunks"),
    [
        pytest.param(stages, chunks, marks=pytest.mark.layouts if stages * chunks > 8 else [])
        for stages in range(2, 9)
        for chunks in range(1, 5)
    ],
)
def test_no_stage_waits_for_ever_even_if_nothing_overlaps(stages, chunks, trains):
    for count in range(1, 25):
        plans = [stage_plan(r, stages, chunks, count, trains=trains) for r in range(stages)]
        assert all(strict_run(plans, chunks)), count


def test_receives_at_the_last_moment_would_not_do():
    """Why the plan says when: interleaved stages that receive only what they need get stuck."""
    plans = [training_plan(stage, 2, 2, 4) for stage in range(2)]
    assert not all(strict_run(plans, 2))


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(1, 1, 3), (2, 1, 4), (3, 2, 7), (4, 3, 4)]
)
def test_every_input_is_posted_once_and_in_time(stages, chunks, count):
    for orders in (
        [training_plan(stage, stages, chunks, count) for stage in range(stages)],
        [forward_only(count, stages, chunks)] * stages,
    ):
        for stage, plan in enumerate(with_posts(orders)):
            seen = []
            for action in plan:
                seen += action.posts
                if _messages(action, stage, stages, stages * chunks - 1)[0] is not None:
                    assert (action.kind, action.micro_batch, action.chunk) in seen
            needing = [a for a in plan if _messages(a, stage, stages, stages * chunks - 1)[0]]
            assert len(seen) == len(set(seen)) == len(needing)
            assert [(a.kind, a.micro_batch, a.chunk) for a in plan] == [
                (a.kind, a.micro_batch, a.chunk) for a in orders[stage]
            ]
