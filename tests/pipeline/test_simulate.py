"""The simulator against closed formulas and a second reckoning; every schedule through it."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.pipeline import schedule
from lib.pipeline.schedule import Action, Kind, forward_only, group_size, training_plan
from lib.pipeline.simulate import Costs, UnsoundPlan, bubble_formula, simulate

F, B = Kind.FORWARD, Kind.BACKWARD
EXACT = pytest.approx(0, abs=1e-9)


def all_plans(stages, chunks, micro_batches):
    return [training_plan(stage, stages, chunks, micro_batches) for stage in range(stages)]


def actions(words):
    """Plan from words such as ``F0 F1 B0! B1.1!``; the mark is that of a last backward."""
    plan = []
    for word in words.split():
        number, _, chunk = word[1:].rstrip("!").partition(".")
        plan.append(Action(Kind(word[0]), int(number), int(chunk or 0), word.endswith("!")))
    return plan


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_runs_with_the_bubble_and_the_activations_of_the_formulas(stages, chunks):
    for micro_batches in range(1, 25):
        timeline = simulate(
            all_plans(stages, chunks, micro_batches), Costs.uniform(stages * chunks)
        )
        work = 3 * chunks * micro_batches
        if micro_batches >= stages or chunks == 1:
            # (P - 1) (tf + tb) / V, where a chunk's times are the stage's over V.
            assert timeline.makespan - work - 3 * (stages - 1) == EXACT
        else:
            plain = simulate(all_plans(stages, 1, micro_batches), Costs.uniform(stages))
            assert timeline.makespan <= plain.makespan * chunks
        assert timeline.bubble_share - bubble_formula(stages, chunks, micro_batches) == EXACT
        assert timeline.bubble_share - (1 - work / timeline.makespan) == EXACT
        group = group_size(stages, micro_batches)
        for stage, peak in enumerate(timeline.peak_activations):
            most = stages - stage
            if chunks > 1:
                most = 2 * (stages - stage - 1) + (chunks - 1) * group + 1
            assert peak == min(most, micro_batches * chunks)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", range(1, 6))
def test_forward_only_runs_and_keeps_nothing(stages, chunks):
    for micro_batches in range(1, 25):
        plans = [forward_only(micro_batches, stages, chunks)] * stages
        timeline = simulate(plans, Costs.uniform(stages * chunks, forward=1.0))
        assert timeline.peak_activations == (0,) * stages
        if micro_batches >= stages:
            assert timeline.makespan == micro_batches * chunks + stages - 1


@given(
    stages=st.integers(1, 6),
    chunks=st.integers(1, 4),
    micro_batches=st.integers(1, 16),
    forward=st.floats(0.1, 10),
    backward=st.floats(0.1, 10),
)
def test_the_formula_holds_for_any_ratio_of_forward_and_backward(
    stages, chunks, micro_batches, forward, backward
):
    costs = Costs.uniform(stages * chunks, forward=forward, backward=backward)
    timeline = simulate(all_plans(stages, chunks, micro_batches), costs)
    expected = bubble_formula(stages, chunks, micro_batches)
    assert timeline.bubble_share == pytest.approx(expected, abs=1e-9)


@st.composite
def uneven_pipelines(draw):
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    times = st.tuples(*[st.integers(1, 9).map(float)] * (stages * chunks))
    costs = Costs(draw(times), draw(times), draw(st.integers(0, 5).map(float)))
    return stages, chunks, draw(st.integers(1, 9)), costs


@given(uneven_pipelines())
def test_uneven_slabs_and_slow_transfers_against_longest_paths(pipeline):
    stages, chunks, micro_batches, costs = pipeline
    plans = all_plans(stages, chunks, micro_batches)
    slabs = stages * chunks
    places = {
        (action.kind, action.micro_batch, action.chunk * stages + stage): (stage, place)
        for stage, plan in enumerate(plans)
        for place, action in enumerate(plan)
    }
    names = {place: name for name, place in places.items()}

    @functools.cache
    def end(stage, place):
        """The longest path of work and transfers that ends with this action."""
        kind, number, slab = names[stage, place]
        before = [end(stage, place - 1)] if place else [0.0]
        if kind is F and slab > 0:
            before.append(end(*places[F, number, slab - 1]) + costs.transfer * (stages > 1))
        if kind is B and slab < slabs - 1:
            before.append(end(*places[B, number, slab + 1]) + costs.transfer * (stages > 1))
        if kind is B:
            before.append(end(*places[F, number, slab]))
        return max(before) + (costs.forward if kind is F else costs.backward)[slab]

    timeline = simulate(plans, costs)
    for stage, spans in enumerate(timeline.stages):
        assert [span.action for span in spans] == plans[stage]
        assert [span.end for span in spans] == [end(stage, place) for place in range(len(spans))]
    busy = [sum(span.end - span.start for span in spans) for spans in timeline.stages]
    assert timeline.makespan == max(end(stage, len(plans[stage]) - 1) for stage in range(stages))
    for share, time in zip(timeline.idle_shares, busy, strict=True):
        assert share == pytest.approx(1 - time / timeline.makespan)


def test_a_step_drawn_by_hand():
    timeline = simulate(all_plans(2, 1, 2), Costs((1, 1), (2, 2), transfer=0.5))
    times = [[(span.start, span.end) for span in spans] for spans in timeline.stages]
    assert times == [
        [(0, 1), (1, 2), (5.0, 7.0), (8.0, 10.0)],
        [(1.5, 2.5), (2.5, 4.5), (4.5, 5.5), (5.5, 7.5)],
    ]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        (["F0 B0! F0"], "stage 0: F0.0 comes twice"),
        (["F0 B0! B0!"], "stage 0: B0.0 comes twice"),
        (["B0! F0"], "stage 0: B0.0 comes before its forward"),
        (["F0 F1 B0!"], "stage 0: micro batch 1 of chunk 0 is left out"),
        (["F0 B0!", "B0!"], "stage 1: B0.0 comes before its forward"),
        (["F0 B0!", ""], "stage 1: micro batch 0 of chunk 0 is left out"),
        (["F0 F0.1 B0.1! B0!", "F0 B0!"], "stage 1: micro batch 0 of chunk 1 is left out"),
        (["F0 F1 B0 B1"], "stage 0: chunk 0 marks another last backward"),
        (["F0 F1 B0! B1"], "stage 0: chunk 0 marks another last backward"),
        (["F0 F1 B0! B1!"], "stage 0: chunk 0 marks another last backward"),
        (
            ["F0 F1 B0 B1!", "F1 B1 F0 B0!"],
            "activations from stage 0 to stage 1, message 0: "
            "sent is micro batch 0 of slab 0, wanted is micro batch 1 of slab 0",
        ),
        (
            ["F0 F1 B0 B1!", "F0 F1 B1 B0!"],
            "gradients from stage 1 to stage 0, message 0: "
            "sent is micro batch 1 of slab 1, wanted is micro batch 0 of slab 1",
        ),
        (  # each channel is in order, but both stages want the other one first
            ["F0 B0 F1 B1!", "F0 F1 B0 B1!"],
            "these stages wait for ever: stage 0 at its action 1, B0.0, for B0.0 of stage 1; "
            "stage 1 at its action 1, F1.0, for F1.0 of stage 0",
        ),
    ],
)
def test_unsound_plans_are_named(plans, message):
    made = [actions(words) for words in plans]
    slabs = len(made) * (1 + max(action.chunk for plan in made for action in plan))
    with pytest.raises(UnsoundPlan) as caught:
        simulate(made, Costs.uniform(slabs))
    assert str(caught.value) == message


def test_groups_smaller_than_the_rule_wait_or_deadlock(monkeypatch):
    """Why ``group_size`` is what it is: the last group must fill the stages too."""
    monkeypatch.setattr(schedule, "group_size", lambda stages, micro_batches: stages)
    timeline = simulate(all_plans(2, 2, 3), Costs.uniform(4))  # groups of 2 and 1
    assert timeline.bubble_share > bubble_formula(2, 2, 3) + 0.01
    with pytest.raises(UnsoundPlan, match=r"wait for ever: stage 0 .*; stage 1 .* of stage"):
        simulate(all_plans(4, 3, 5), Costs.uniform(12))  # groups of 4 and 1


def test_a_step_without_micro_batches():
    timeline = simulate([[], []], Costs.uniform(2))
    assert (timeline.makespan, timeline.peak_activations) == (0.0, (0, 0))
