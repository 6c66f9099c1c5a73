"""What is advised where a run does not fit; what is read of torch's message."""

from dataclasses import replace

import pytest

from lib.config.operation import RuntimeConfig
from lib.plan.ceilings import H200
from lib.plan.memory import GIB, peak_memory
from lib.plan.out_of_memory import Exhausted, explain, parse
from lib.plan.remedies import advice, remedies
from tests.plan.works import PIPELINE, REFERENCE, SINGLE, work

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 44.40 GiB of "
    "which 512.00 MiB is free. Process 4711 has 2.00 GiB memory in use. Process 4712 has 300.00 "
    "MiB memory in use. Including non-PyTorch memory, this process has 41.00 GiB memory in use. Of "
    "the allocated memory 38.50 GiB is allocated by PyTorch, and 1.25 GiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting ..."
)


def test_what_fits_needs_no_advice():
    assert advice(SINGLE, H200.memory_gib * GIB, H200) == []


def test_what_does_not_fit_is_told_what_does():
    (line,) = advice(SINGLE, 40 * GIB)
    assert "activations" in line
    assert "training.micro_batch_size: 4 fits" in line
    assert peak_memory(replace(SINGLE, micro_batch_size=4)).kinds.total < 0.93 * 40 * GIB


def test_without_a_micro_batch_that_fits_other_changes_are_named():
    (line,) = advice(SINGLE, 20 * GIB)
    assert "runtime.recompute: full saves" in line


def test_long_bubbles_are_told_of():
    few = replace(PIPELINE, micro_batches=2)
    assert any("wait" in line for line in advice(few, 140 * GIB, H200))
    assert advice(PIPELINE, 140 * GIB, H200) == []


def test_kernels_that_the_plan_is_not_of_are_told_of():
    plain = replace(SINGLE, runtime=RuntimeConfig(kernels="torch"))
    (line,) = advice(plain, 140 * GIB)
    assert "runtime.kernels" in line


def test_remedies_come_in_their_order_and_say_what_the_plan_says():
    laid = work(tensor=2, data=2)
    found = remedies(laid)
    names = [each.text.split(":")[0] for each in found]
    assert names == [
        "training.micro_batch_size",
        "runtime.recompute",
        "runtime.recompute",
        "training.seq_length",
        "parallel.sequence",
        "parallel.tensor",
        "parallel.pipeline",
    ]
    full = replace(laid, runtime=RuntimeConfig(recompute="full"))
    saved = peak_memory(laid).kinds.total - peak_memory(full).kinds.total
    assert {each.text: each.saved for each in found}["runtime.recompute: full"] == saved


def test_what_cannot_be_changed_is_not_named():
    odd = REFERENCE.model_copy(update={"num_layers": 1, "num_attention_heads": 1, "head_dim": 64})
    odd = odd.model_copy(update={"num_query_groups": 1})
    texts = [each.text for each in remedies(work(odd, (1, 4)))]
    assert not any(key in text for text in texts for key in ("tensor", "pipeline", "micro_batch"))


def test_torchs_message():
    assert parse(MESSAGE) == Exhausted(
        wanted=round(1.53 * GIB),
        capacity=round(44.4 * GIB),
        allocated=round(38.5 * GIB),
        unused=round(1.25 * GIB),
        others=((4711, 2 * GIB), (4712, 300 * 2**20)),
    )
    assert parse("no such words") == Exhausted()


def test_an_explanation():
    lines = explain(SINGLE, 0, MESSAGE)
    assert "tensors held 38.50 GiB" in lines[0]
    assert "most of it activations" in lines[1]
    assert [line for line in lines if "4711" in line and "2.00 GiB" in line]
    assert "expandable_segments" in lines[-1]
    assert "expandable_segments" not in explain(SINGLE, 0, "")[-1]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_explanation_is_of_the_stage_that_died(stage):
    kind = "activations" if stage == 0 else "optimizer"
    assert f"most of it {kind}" in explain(PIPELINE, stage, MESSAGE)[1]
