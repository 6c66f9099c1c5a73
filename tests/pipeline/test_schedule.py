"""Plans: drawn by hand, and properties for every place in every small pipeline.

That the plans of all stages fit together is proved in test_simulate.
"""

import pytest

from lib.pipeline.schedule import (
    Action,
    Kind,
    forward_only,
    group_size,
    interleaved,
    one_forward_one_backward,
    training_plan,
)

PLACES = [
    (stage, stages, micro_batches)
    for stages in range(1, 9)
    for stage in range(stages)
    for micro_batches in range(1, 9)
]
CHUNKS = [1, 2, 3, 4]


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
    assert text(training_plan(stage, stages, 1, micro_batches)) == expected


# Micro batch, then chunk. Two stages: groups of two, warm-up of 4 and of 2 forwards.
@pytest.mark.parametrize(
    ("stage", "micro_batches", "expected"),
    [
        (
            0,
            4,
            "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
        ),
        (
            1,
            4,
            "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0",
        ),
        (0, 3, "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0.0 B1.0 B2.0"),  # a group of 3
        (1, 3, "F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 B0.0 B1.0 B2.0"),
        (0, 1, "F0.0 F0.1 B0.1 B0.0"),  # fewer than stages
        (1, 1, "F0.0 F0.1 B0.1 B0.0"),
    ],
)
def test_interleaved_plans_drawn_by_hand(stage, micro_batches, expected):
    assert " ".join(map(str, interleaved(stage, 2, 2, micro_batches))) == expected
    assert training_plan(stage, 2, 2, micro_batches) == interleaved(stage, 2, 2, micro_batches)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_every_micro_batch_goes_once_through_every_chunk_in_order(chunks):
    for stage, stages, micro_batches in PLACES:
        plan = training_plan(stage, stages, chunks, micro_batches)
        for kind in Kind:
            for chunk in range(chunks):
                numbers = [a.micro_batch for a in plan if (a.kind, a.chunk) == (kind, chunk)]
                assert numbers == list(range(micro_batches))
        assert len(plan) == 2 * micro_batches * chunks


def test_few_are_in_flight():
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


@pytest.mark.parametrize("chunks", CHUNKS)
def test_the_last_backward_of_each_chunk_is_marked(chunks):
    for stage, stages, micro_batches in PLACES:
        plan = training_plan(stage, stages, chunks, micro_batches)
        assert plan[-1].last_backward
        left = set(range(chunks))  # chunks with backwards to come, read from the end
        for action in reversed(plan):
            is_last = action.kind is Kind.BACKWARD and action.chunk in left
            assert action.last_backward == is_last
            left -= {action.chunk} if is_last else set()


@pytest.mark.parametrize("stages", range(1, 9))
def test_groups_are_the_smallest_whose_every_part_fills_the_stages(stages):
    assert group_size(stages, 4 * stages) == stages
    for micro_batches in range(1, 40):
        size = group_size(stages, micro_batches)
        fits = [
            g
            for g in range(stages, micro_batches + 1)
            if micro_batches % g == 0 or micro_batches % g >= stages
        ]
        assert size == (fits[0] if fits else micro_batches)
        assert bool(fits) == (micro_batches >= stages)


def test_forward_only():
    assert forward_only(0) == []
    assert forward_only(3) == [Action(Kind.FORWARD, number) for number in range(3)]
    assert text(forward_only(2)) == "F0 F1"


def test_forward_only_takes_the_order_of_the_training_forwards():
    for stage, stages, micro_batches in PLACES:
        for chunks in CHUNKS:
            plan = training_plan(stage, stages, chunks, micro_batches)
            forwards = [action for action in plan if action.kind is Kind.FORWARD]
            assert forward_only(micro_batches, stages, chunks) == forwards
