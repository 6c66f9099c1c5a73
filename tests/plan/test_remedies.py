"""What is advised where a run does not fit; what is read of torch's message."""

import re
from dataclasses import replace

import pytest
import yaml

from lib.config.data_section import DataSection
from lib.config.operation import RuntimeConfig
from lib.config.rules import broken_rules
from lib.config.schema import ParallelConfig
from lib.plan.memory import GIB, USABLE, peak_memory
from lib.plan.out_of_memory import Exhausted, explain, parse
from lib.plan.remedies import remedies, run_fits_the_gpus
from lib.plan.work import works_of
from lib.workflow.shapes import REFERENCES, measured_run
from tests.plan.works import PIPELINE, REFERENCE, SINGLE, work

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 44.40 GiB of "
    "which 512.00 MiB is free. Process 4711 has 2.00 GiB memory in use. Process 4712 has 300.00 "
    "MiB memory in use. Including non-PyTorch memory, this process has 41.00 GiB memory in use. Of "
    "the allocated memory 38.50 GiB is allocated by PyTorch, and 1.25 GiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting ..."
)


def told(works, gib):
    return [str(problem) for problem in run_fits_the_gpus(works, gib * GIB)]


def test_what_fits_needs_no_advice():
    need = peak_memory(SINGLE).kinds.total / GIB
    assert told([SINGLE], need / USABLE * 1.001) == []
    assert len(told([SINGLE], need / USABLE * 0.999)) == 1


def test_what_does_not_fit_is_told_with_what_does():
    (line,) = told([SINGLE], 40)
    need, small = (
        peak_memory(each).kinds.total for each in (SINGLE, replace(SINGLE, micro_batch_size=4))
    )
    assert small < USABLE * 40 * GIB < need
    assert line.startswith("training.micro_batch_size = 8: ")
    for text in (
        f"stage 0 needs {need / GIB:.1f} GiB, most of it activations (",
        "of 37.2 that tensors may take of a GPU's 40.0",
        f"; training.micro_batch_size: 4 saves {(need - small) / GIB:.1f} GiB, and fits; ",
        "runtime.recompute: full saves",
    ):
        assert text in line


def test_the_first_change_that_is_enough_is_named_however_late_it_comes():
    (line,) = told([SINGLE], 27)
    assert "micro_batch_size: 4 saves" in line
    assert line.count(" saves ") == 4
    assert line.endswith("and fits")
    assert line.count("and fits") == 1


def test_of_phases_the_one_that_needs_most_is_told():
    longer = replace(SINGLE, seq_length=4096)
    (line,) = told([SINGLE, longer], 60)
    assert line.startswith("training.micro_batch_size = 8: ")
    assert "data.phases[0]: stage 0 needs" in line
    (line,) = told([replace(SINGLE, micro_batch_size=2), SINGLE, SINGLE], 40)
    assert line.startswith("data.phases[0].micro_batch_size = 8: ")
    assert told([SINGLE, replace(SINGLE, micro_batch_size=2)], 60) == []


def test_remedies_come_in_their_order_and_say_what_the_plan_says():
    laid = work(tensor=2, data=2)
    found = remedies([laid])
    names = [each.text.split(":")[0] for each in found]
    assert names == [
        "training.micro_batch_size",
        "runtime.recompute",  # full; selective saves nothing worth naming of fused attention
        "training.seq_length",
        "parallel.sharding",
        "parallel.sequence",
        "parallel.tensor",
        "parallel.pipeline",
    ]
    full = replace(laid, runtime=RuntimeConfig(recompute="full"))
    saved = peak_memory(laid).kinds.total - peak_memory(full).kinds.total
    assert {each.text: each.saved for each in found}["runtime.recompute: full"] == saved


def written(text, run, runtime):
    """The run and its runtime with what a remedy says, as a person would write it."""
    text = re.sub(r" on \d+ GPUs$", "", text)
    first, *others = text.replace(" with ", ", ").split(", ")
    field, value = first.split(": ")
    section, key = field.rsplit(".", 1)
    changes = {key: value, **dict(each.split(": ") for each in others)}
    changes = {key: yaml.safe_load(text) for key, text in changes.items()}
    if section == "runtime":
        return run, RuntimeConfig.model_validate(runtime.model_dump() | changes)
    if section == "data.phases[0]":
        phase = run.data.phases[0].model_dump() | changes
        data = run.data.model_dump() | {"phases": [phase]}
        return replace(run, data=DataSection.model_validate(data)), runtime
    old = getattr(run, section)
    return replace(run, **{section: type(old).model_validate(old.model_dump() | changes)}), runtime


SHAPES = {
    "odd batch": (replace(REFERENCES["1.4b"], micro_batch_size=5, micro_batches=3), {}),
    "odd copies": (REFERENCES["1.4b"], {"data": 3}),
    "odd length": (replace(REFERENCES["1.4b"], seq_length=1022), {"tensor": 4, "data": 2}),
    "short": (replace(REFERENCES["1.4b"], seq_length=1), {"data": 2}),
    "shared": (REFERENCES["7b"], {"tensor": 2, "sequence": True, "data": 4, "data_shard": 2}),
    "given layers": (REFERENCES["125m"], {"pipeline": 2, "layers_per_chunk": (5, 7)}),
}


@pytest.mark.parametrize("phase", [{}, {"seq_length": 4096}, {"micro_batch_size": 15}])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_advised_can_be_written_and_saves_what_it_says(name, phase):
    shape, layout = SHAPES[name]
    run = measured_run(shape, ParallelConfig.model_validate({"data": 1} | layout), "bf16")
    batch = run.training.global_batch_size * 15
    data = DataSection.model_validate(
        {"phases": [{"from_samples": batch} | phase] if phase else []}
    )
    training = run.training.model_copy(update={"global_batch_size": batch})
    run = replace(run, data=data, training=training)
    runtime = RuntimeConfig(recompute_method="block", recompute_layers=3)

    def peaks(run, runtime):
        sections = vars(run) | {"vocab_size": shape.vocab_size}
        assert broken_rules(sections) == []
        works = works_of(run, runtime, shape.vocab_size, run.parallel.processes)
        return works, [peak_memory(each).kinds.total for each in works]

    works, before = peaks(run, runtime)
    fullest = before.index(max(before))
    found = remedies(works, fullest)
    assert found
    for each in found:
        _, after = peaks(*written(each.text, run, runtime))
        assert before[fullest] - after[fullest] == each.saved, each.text


def test_what_cannot_be_changed_is_not_named():
    odd = REFERENCE.model_copy(update={"num_layers": 1, "num_attention_heads": 1, "head_dim": 64})
    odd = odd.model_copy(update={"num_query_groups": 1})
    texts = [each.text for each in remedies([work(odd, (1, 4))])]
    assert {text.partition(":")[0] for text in texts} == {
        "runtime.recompute",
        "training.seq_length",
    }


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
    lines = explain([SINGLE], 0, MESSAGE)
    assert "tensors held 38.50 GiB" in lines[0]
    assert "most of it activations" in lines[1]
    assert [line for line in lines if "4711" in line and "2.00 GiB" in line]
    assert "expandable_segments" in lines[-1]
    plan_only = explain([SINGLE], 0, "CUBLAS_STATUS_ALLOC_FAILED")
    assert plan_only == [line for line in lines[1:-1] if "process 471" not in line]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_explanation_is_of_the_stage_that_died(stage):
    kind = "activations" if stage == 0 else "optimizer"
    assert f"most of it {kind}" in explain([PIPELINE], stage, MESSAGE)[1]
