"""The search finds only layouts that can run, ranks them, and says why others cannot."""

from dataclasses import replace

import pytest

from lib.config.launch_plan import layout_for
from lib.config.operation import RuntimeConfig
from lib.config.rules import broken_rules
from lib.config.schema import ParallelConfig
from lib.plan.ceilings import H200, known_ceilings
from lib.plan.memory import GIB, largest_micro_batch, peak_memory
from lib.plan.search import Machines, search
from lib.plan.time import step_time
from lib.workflow.shapes import REFERENCES, measured_run
from tests.plan.works import DATA, SINGLE, work

VOCAB = 50304


def run_of(name, batch):
    run = measured_run(REFERENCES[name], ParallelConfig(data=1), "bf16")
    return replace(run, training=run.training.model_copy(update={"global_batch_size": batch}))


def found(name, batch, gpus, *, gib=139.8, per_node=8, rates=H200):
    run = run_of(name, batch)
    machines = Machines(gpus, min(gpus, per_node), gib * GIB, rates)
    return run, machines, search(run, RuntimeConfig(), VOCAB, machines)


@pytest.mark.parametrize(
    ("name", "batch", "gpus", "gib"),
    [("125m", 48, 2, 23.5), ("1.4b", 64, 8, 44.4), ("7b", 96, 12, 79.2), ("7b", 32, 4, 79.2)],
)
def test_every_layout_that_is_found_can_run(name, batch, gpus, gib):
    run, machines, result = found(name, batch, gpus, gib=gib, per_node=4)
    assert result.ranked
    rates = [each.time.tokens_per_second for each in result.ranked]
    assert rates == sorted(rates, reverse=True)
    for each in result.ranked:
        layout, size = each.work.parallel, each.work.micro_batch_size
        training = run.training.model_copy(update={"micro_batch_size": size})
        sections = {"model": run.model, "parallel": layout, "training": training}
        assert broken_rules(sections | {"vocab_size": VOCAB}) == []
        laid = layout_for(replace(run, parallel=layout, training=training), gpus)
        assert laid.micro_batches == each.work.micro_batches
        assert layout.tensor <= machines.gpus_per_node
        assert peak_memory(each.work).kinds.total == each.memory.kinds.total <= machines.usable


def test_micro_batches_divide_the_batches_of_a_rampup_and_of_phases():
    run = run_of("125m", 48)
    keys = {"rampup_start_batch_size": 12, "rampup_increment": 36, "rampup_samples": 480}
    lengths = {"train_iters": None, "train_samples": 48 * 1000}
    training = run.training.model_copy(update=keys | lengths)
    phase = {"from_samples": 480, "micro_batch_size": 16}
    data = run.data.model_validate({"phases": [phase]})
    run = replace(run, training=training, data=data)
    result = search(run, RuntimeConfig(), VOCAB, Machines(4, 4, 139.8 * GIB, H200))
    assert result.ranked
    for each in result.ranked:
        layout = each.work.parallel
        given = training.model_copy(update={"micro_batch_size": each.work.micro_batch_size})
        sections = {"model": run.model, "parallel": layout, "training": given, "data": data}
        assert broken_rules(sections | {"vocab_size": VOCAB}) == []


def test_the_first_is_the_best_of_all_by_trying():
    _, machines, result = found("1.4b", 16, 2, gib=44.4)
    rates = []
    copies = [{"data": 2, "sharding": kind} for kind in ("optimizer", "gradients")]
    for layout in (*copies, {"tensor": 2, "sequence": True}, {"pipeline": 2}):
        for chunks in (1, 2, 3, 4) if "pipeline" in layout else (1,):
            for size in (1, 2, 4, 8, 16):
                count = 16 // size // layout.get("data", 1)
                planned = work(sizes=(size, count), virtual_stages=chunks, **layout)
                if count and peak_memory(planned).kinds.total <= machines.usable:
                    rates.append(step_time(planned, H200).tokens_per_second)
    assert 0.98 * max(rates) <= result.ranked[0].time.tokens_per_second <= max(rates)


def test_of_micro_batches_that_are_as_fast_the_smallest():
    _, machines, result = found("1.4b", 32, 1, gib=139.8)
    rates = {}
    for size in (1, 2, 4, 8, 16, 32):
        planned = work(sizes=(size, 32 // size))
        assert peak_memory(planned).kinds.total <= machines.usable
        rates[size] = step_time(planned, H200).tokens_per_second
    (chosen,) = result.ranked
    size = chosen.work.micro_batch_size
    assert rates[size] >= 0.98 * max(rates.values())
    assert size > 1
    assert rates[size // 2] < 0.98 * max(rates.values())


def test_memory_is_saved_only_where_it_must_be():
    _, _, roomy = found("1.4b", 64, 4)
    assert {each.work.runtime.recompute for each in roomy.ranked} == {"none"}
    assert {each.work.parallel.sharding for each in roomy.ranked} == {"optimizer"}
    _, _, tight = found("7b", 64, 2, gib=79.2)
    assert all(each.memory.kinds.total <= 0.93 * 79.2 * GIB for each in tight.ranked)
    assert any(each.work.runtime.recompute == "full" for each in tight.ranked)


def test_reasons_of_those_that_fall_out():
    _, _, result = found("7b", 8, 4, gib=14.6, rates=known_ceilings("T4"))
    assert result.ranked == []
    assert all("does not fit" in reason or "num_layers" in reason for reason, _ in result.fallen)
    _, _, result = found("125m", 3, 2)
    reasons = " ".join(reason for reason, _ in result.fallen)
    assert "does not divide among 2 copies" in reasons


def test_three_heads_fall_out_of_tensor_parallelism():
    run = run_of("125m", 16)
    odd = run.model.model_copy(update={"num_attention_heads": 3})
    machines = Machines(2, 2, 80 * GIB, H200)
    result = search(replace(run, model=odd), RuntimeConfig(), VOCAB, machines)
    assert all(each.work.parallel.tensor == 1 for each in result.ranked)
    assert any("num_attention_heads" in reason for reason, _ in result.fallen)


def test_the_largest_micro_batch():
    fitting = largest_micro_batch(SINGLE, 0.93 * 90 * GIB)
    assert fitting is not None
    assert fitting.micro_batch_size == 16
    assert fitting.micro_batches == 2
    assert largest_micro_batch(DATA, 10 * GIB) is None


def test_search_considers_the_longest_phase():
    run = run_of("1.4b", 16)
    data = run.data.model_validate({"phases": [{"from_samples": 160, "seq_length": 8192}]})
    machines = Machines(2, 2, 80 * GIB, H200)
    result = search(replace(run, data=data), RuntimeConfig(), VOCAB, machines)
    assert {each.work.seq_length for each in result.ranked} == {8192}
