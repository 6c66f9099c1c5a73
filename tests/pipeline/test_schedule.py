"""The 1F1B plan: properties for every place in every small pipeline, and one drawn by hand."""

import itertools

import pytest

from lib.pipeline.schedule import Action, Kind, forward_only, one_forward_one_backward

PLACES = [
    (stage, stages, micro_batches)
    for stages in range(1, 9)
    for stage in range(stages)
    for micro_batches in range(1, 9)
]


def text(plan):
    return " ".join(f"{action.kind.value}{action.micro_batch}" for action in plan)


@pytest.mark.parametrize(
    ("stage", "stages", "micro_batches", "expected"),
    [
        (0, 1, 3, "F0 B0 F1 B1 F2 B2"),
        (0, 2, 3, "F0 F1 B0 F2 B1 B2"),
        (1, 2, 3, "F0 B0 F1 B1 F2 B2"),
        (0, 4, 4, "F0 F1 F2 F3 B0 B1 B2 B3"),
        (1, 4, 4, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (3, 4, 4, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (0, 4, 2, "F0 F1 B0 B1"),
    ],
)
def test_plans_drawn_by_hand(stage, stages, micro_batches, expected):
    assert text(one_forward_one_backward(stage, stages, micro_batches)) == expected


def test_every_micro_batch_goes_once_forward_and_once_backward_in_order():
    for place in PLACES:
        plan = one_forward_one_backward(*place)
        for kind in Kind:
            numbers = [action.micro_batch for action in plan if action.kind is kind]
            assert numbers == list(range(place[2]))
        assert len(plan) == 2 * place[2]


def test_backward_follows_forward_and_few_are_in_flight():
    for stage, stages, micro_batches in PLACES:
        seen, in_flight, most = set(), 0, 0
        for action in one_forward_one_backward(stage, stages, micro_batches):
            if action.kind is Kind.FORWARD:
                seen.add(action.micro_batch)
                in_flight += 1
            else:
                assert action.micro_batch in seen
                in_flight -= 1
            most = max(most, in_flight)
        assert most == min(stages - stage, micro_batches)
        assert in_flight == 0


def test_exactly_one_last_backward_and_it_is_the_last_action():
    for place in PLACES:
        plan = one_forward_one_backward(*place)
        assert [action.last_backward for action in plan] == [False] * (len(plan) - 1) + [True]
        assert plan[-1].kind is Kind.BACKWARD


def clock(stages, micro_batches):
    """Time units until all stages are done, an action a unit, or None where they wait for ever."""
    plans = [list(one_forward_one_backward(s, stages, micro_batches)) for s in range(stages)]
    done: set[tuple[int, Kind, int]] = set()
    for now in itertools.count():
        if not any(plans):
            return now
        ready = []
        for stage, plan in enumerate(plans):
            if not plan:
                continue
            kind, number = plan[0].kind, plan[0].micro_batch
            other = stage - 1 if kind is Kind.FORWARD else stage + 1
            if not 0 <= other < stages or (other, kind, number) in done:
                ready.append((stage, kind, number))
        if not ready:
            return None
        for stage, _, _ in ready:
            plans[stage].pop(0)
        done |= set(ready)
    raise AssertionError


def test_stages_never_wait_for_ever_and_the_bubble_is_the_formulas():
    for stages in range(1, 9):
        for micro_batches in range(1, 9):
            # 2 m units of work, and (p - 1) / m of it idle: 2 (p - 1) units.
            assert clock(stages, micro_batches) == 2 * micro_batches + 2 * (stages - 1)


def test_forward_only():
    assert forward_only(0) == []
    assert forward_only(3) == [Action(Kind.FORWARD, number) for number in range(3)]
    assert text(forward_only(2)) == "F0 F1"
