"""Expected step times beside measured rates; the pipeline in closed form beside the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config.operation import RuntimeConfig
from lib.pipeline.schedule import training_plan
from lib.pipeline.simulate import Costs, bubble_formula, simulate
from lib.plan.ceilings import H200
from lib.plan.time import pipeline_seconds, step_time
from tests.plan.works import DATA, PIPELINE, SINGLE, SMALL, TENSOR, work

LAUNCHED = RuntimeConfig(cuda_graphs="off")
MEASURED = {
    "1 GPU": (SINGLE, 66_300),
    "dp2": (DATA, 130_700),
    "pp2": (PIPELINE, 111_000),
    "tp2+sp": (TENSOR, 102_000),
    "125m": (work(SMALL, (32, 1)), 526_000),
    "125m, small batches": (work(SMALL, (8, 4)), 532_700),
    "125m, small batches, launched": (replace(work(SMALL, (8, 4)), runtime=LAUNCHED), 283_500),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_on_gpus(name):
    planned, rate = MEASURED[name]
    assert step_time(planned, H200).tokens_per_second == pytest.approx(rate, rel=0.15)


def test_small_work_is_bound_by_the_host_unless_it_is_replayed():
    small = work(SMALL, (8, 4))
    assert step_time(replace(small, runtime=LAUNCHED), H200).host_bound
    assert not step_time(small, H200).host_bound
    dropping = replace(small, model=small.model.model_copy(update={"hidden_dropout": 0.1}))
    assert step_time(dropping, H200).host_bound
    assert not step_time(replace(SINGLE, runtime=LAUNCHED), H200).host_bound


@given(
    stages=st.integers(1, 6),
    chunks=st.integers(1, 3),
    count=st.integers(1, 24),
    cost=st.floats(0.1, 10),
)
def test_equal_chunks_take_what_the_simulator_says(stages, chunks, count, cost):
    chunks = chunks if stages > 1 else 1
    plans = [training_plan(stage, stages, chunks, count) for stage in range(stages)]
    slabs = stages * chunks
    timeline = simulate(plans, Costs.uniform(slabs, forward=cost / 3, backward=cost * 2 / 3))
    whole = pipeline_seconds([cost] * slabs, stages, count)
    assert whole == pytest.approx(timeline.makespan)
    busy = count * chunks * cost
    assert 1 - busy / whole == pytest.approx(bubble_formula(stages, chunks, count))


@given(st.lists(st.floats(0.7, 1.3), min_size=2, max_size=6), st.integers(2, 24))
def test_unequal_stages_take_about_what_the_simulator_says(costs, count):
    stages = len(costs)
    plans = [training_plan(stage, stages, 1, count) for stage in range(stages)]
    halves = Costs(tuple(c / 3 for c in costs), tuple(c * 2 / 3 for c in costs))
    whole = pipeline_seconds(costs, stages, count)
    simulated = simulate(plans, halves).makespan
    # Too long at most, where the first stage is the slowest and there are few micro batches.
    assert simulated * (1 - 1e-9) <= whole <= 1.25 * simulated


def test_recomputing_takes_about_a_third_more():
    again = replace(SINGLE, runtime=RuntimeConfig(recompute="full"))
    ratio = step_time(again, H200).seconds / step_time(SINGLE, H200).seconds
    assert 1.2 < ratio < 1.34


def test_transfers_between_nodes_cost_more():
    laid = work(tensor=8, sequence=True, data=2)
    within, across = step_time(laid, H200, 16), step_time(laid, H200, 4)
    assert across.exposed > 2 * within.exposed
    assert across.seconds > within.seconds


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize(("data", "shard"), [(2, None), (4, None), (4, 2), (8, None), (8, 4)])
def test_copies_talk_between_nodes_where_their_ranks_are_on_several(tensor, pipeline, data, shard):
    """By the grid of ``lib.parallel.mesh``: tensor is fastest, then data, then pipeline."""
    planned = work(sizes=(1, 16), tensor=tensor, pipeline=pipeline, data=data, data_shard=shard)
    groups = np.arange(tensor * pipeline * data).reshape(pipeline, data, tensor)
    nodes = [set(group // 8) for stage in groups for group in stage.T]
    together, apart = (step_time(planned, H200, size).exposed for size in (planned.ranks, 8))
    assert (apart > together) == any(len(each) > 1 for each in nodes)


def test_copies_of_the_model_multiply_the_tokens():
    one, eight = step_time(SINGLE, H200), step_time(work(data=8), H200)
    assert 7 < eight.tokens_per_second / one.tokens_per_second < 8.2
    assert eight.tflops_per_gpu < 1.03 * one.tflops_per_gpu
