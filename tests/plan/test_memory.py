"""The peak of a step, beside what was measured on GPUs, and how it moves with what is planned."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config.operation import RuntimeConfig
from lib.parallel.data_parallel import MOST_REDUCTIONS
from lib.pipeline.schedule import training_plan
from lib.pipeline.simulate import Costs, simulate
from lib.plan.memory import _REDUCTIONS, GIB, _in_flight, _Stage, peak_memory, stage_memories
from tests.plan.works import DATA, PIPELINE, REFERENCE, SINGLE, TENSOR, work

MEASURED = {"1 GPU": (SINGLE, 49.8), "dp2": (DATA, 44.5), "pp2": (PIPELINE, 26.1)}
MEASURED |= {"tp2+sp": (TENSOR, 25.1)}
WEIGHTS = 24 * (4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048) + 2048 + 2 * 50304 * 2048


def buffers_at(moment, planned):
    """The most buffers of the first stage at one moment."""
    found = [each for each in _Stage(planned, 0).moments() if each.moment == moment]
    return max(each.kinds.buffers for each in found)


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_on_gpus(name):
    planned, gib = MEASURED[name]
    assert peak_memory(planned).kinds.total / GIB == pytest.approx(gib, rel=0.005)


def test_the_state_of_one_rank_by_hand():
    kinds = peak_memory(SINGLE).kinds
    assert (kinds.weights, kinds.gradients, kinds.optimizer) == (
        2 * WEIGHTS,
        4 * WEIGHTS,
        12 * WEIGHTS,
    )
    assert kinds.logits == 8 * 2048 * (50304 * 2 + 2 * 4)
    assert peak_memory(SINGLE).moment == "head"


def test_the_state_of_two_ranks_by_hand():
    kinds = peak_memory(DATA).kinds
    assert kinds.weights == 2 * WEIGHTS
    assert kinds.gradients == 4 * WEIGHTS + 4 * WEIGHTS // 2
    assert kinds.optimizer == 12 * WEIGHTS // 2


def test_a_step_is_not_fullest_when_parameters_come():
    """They come a layer at a time, in the compute type; all at once they were most of it."""
    planned = work(sizes=(1, 4), seq_length=256, data=2)
    assert peak_memory(planned).moment != "start"
    layer = 4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048
    ends = 2 * 50304 * 2048 + 2048
    state = 2 * 32 * 2**20 + 4 * 256 * 20 + 4 * 256 * 128
    assert buffers_at("start", planned) == state + 2 * (ends + layer) * (1 + 2) // 2


def test_gradients_of_two_blocks_are_on_their_way_at_once():
    """The largest two are the ends of the model: its table, and the output with the last norm."""
    assert _REDUCTIONS == MOST_REDUCTIONS
    table = 50304 * 2048
    end = buffers_at("end", work(sizes=(1, 4), data=8))
    base = buffers_at("end", work(sizes=(1, 4)))
    assert end - base == 4 * (2 * table + 2048)
    sharded = buffers_at("head", work(sizes=(1, 4), data=8, sharding="gradients"))
    whole = buffers_at("head", work(sizes=(1, 4), data=8))
    sums_that_come_back = 4 * (2 * table + 2048) // 8
    assert sharded - whole == 4 * (2 * table + 2048) + sums_that_come_back


@given(
    size=st.sampled_from([1, 2, 4, 8, 32]),
    count=st.integers(1, 4),
    layout=st.sampled_from(
        [{"data": 2}, {"data": 8}, {"data": 4, "tensor": 2}, {"data": 4, "pipeline": 2}]
    ),
)
def test_what_is_sharded_more_needs_less(size, count, layout):
    ways = ("optimizer", "gradients", "parameters")
    found = [peak_memory(work(sizes=(size, count), sharding=way, **layout)) for way in ways]
    totals = [each.kinds.total for each in found]
    assert totals == sorted(totals, reverse=True)


def test_the_first_stage_keeps_the_micro_batches_of_its_plan():
    first, last = stage_memories(PIPELINE)
    assert (first.in_flight, last.in_flight) == (2, 1)
    assert first.kinds.logits == 0


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(4, 1, 9), (2, 3, 8), (4, 2, 6), (1, 1, 3)]
)
def test_in_flight_is_what_the_simulator_counts(stages, chunks, count):
    plans = [training_plan(stage, stages, chunks, count) for stage in range(stages)]
    peaks = simulate(plans, Costs.uniform(stages * chunks)).peak_activations
    for stage, most in enumerate(peaks):
        found = [sum(kept) for _, kept in _in_flight(stage, stages, chunks, count)]
        assert max(found) == most


def test_the_buffers_of_a_stage_in_the_middle_by_hand():
    """Workspaces, tokens, positions; what it sends both ways, and receives while it computes."""
    (_, middle, _) = stage_memories(work(sizes=(4, 6), pipeline=3))
    tokens = 4 * 2048
    transfers = 3 * 2 * tokens * 2048
    assert middle.moment == "layer"
    assert middle.kinds.buffers == (
        2 * 32 * 2**20 + 6 * tokens * (8 + 8 + 4) + 4 * 2048 * 128 + transfers
    )


def test_more_micro_batches_than_are_kept_change_nothing_but_their_tokens():
    few = replace(PIPELINE, micro_batches=8)
    for one, other in zip(stage_memories(few), stage_memories(PIPELINE), strict=True):
        tokens = 8 * (8 + 8 + 4) * PIPELINE.tokens
        assert other.kinds.total - one.kinds.total == tokens


RECOMPUTE = [
    RuntimeConfig(),
    RuntimeConfig(recompute="selective"),
    RuntimeConfig(recompute="full", recompute_method="block", recompute_layers=6),
    RuntimeConfig(recompute="full", recompute_method="block", recompute_layers=18),
    RuntimeConfig(recompute="full"),
]


@given(
    size=st.sampled_from([1, 2, 4, 8, 32]),
    layout=st.sampled_from(
        [{}, {"data": 2}, {"tensor": 4, "sequence": True}, {"pipeline": 4, "virtual_stages": 2}]
    ),
)
def test_each_way_of_recomputing_keeps_less_than_the_one_before(size, layout):
    base = work(sizes=(size, 8), **layout)
    found = [peak_memory(replace(base, runtime=runtime)).kinds.total for runtime in RECOMPUTE]
    assert found == sorted(found, reverse=True)


@given(size=st.integers(1, 64), tensor=st.sampled_from([1, 2, 4]))
def test_larger_micro_batches_need_more(size, tensor):
    one = work(sizes=(size, 4), tensor=tensor, sequence=tensor > 1)
    two = replace(one, micro_batch_size=size + 1)
    assert peak_memory(one).kinds.total < peak_memory(two).kinds.total


def test_parameters_that_are_gathered_for_each_use_are_not_kept():
    sharded = work(sizes=(1, 1), data=8, sharding="parameters")
    whole = work(sizes=(1, 1), data=8)
    saved = peak_memory(whole).kinds.weights - peak_memory(sharded).kinds.weights
    layers = WEIGHTS - 2 * 50304 * 2048 - 2048
    assert saved == 2 * layers


def test_attention_that_forms_its_weights_keeps_them():
    formed = replace(SINGLE, runtime=RuntimeConfig(attention="fused_softmax"))
    more = peak_memory(formed).kinds.activations - peak_memory(SINGLE).kinds.activations
    statistics = 4 * 8 * 16 * 2048
    assert more == REFERENCE.num_layers * (8 * 16 * 2048**2 * 2 - statistics)
