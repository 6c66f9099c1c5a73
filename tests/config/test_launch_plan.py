"""Processes and layout: everything divides, or is refused with the numbers."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.config.launch_plan import Layout, choose_device, layout_for, process_count
from lib.config.rules import broken_rules
from lib.errors import UserError
from tests.config.conftest import Factory
from tests.config.sections import launch


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_layouts_that_divide(make: Factory, processes: int, micro_batches: int) -> None:
    layout = layout_for(make.run_config(), processes)  # global batch 8, micro batch 2
    assert layout == Layout(
        tensor=1,
        pipeline=1,
        virtual_stages=1,
        data=processes,
        data_shard=processes,
        micro_batches=micro_batches,
    )
    assert layout.processes == processes


@pytest.mark.parametrize(
    ("batch", "micro", "processes"), [(6, 4, 1), (8, 2, 3), (2, 1, 4), (4, 8, 1)]
)
def test_a_batch_that_does_not_divide_is_refused(
    make: Factory, batch: int, micro: int, processes: int
) -> None:
    run = make.run_config(training={"global_batch_size": batch, "micro_batch_size": micro})
    with pytest.raises(UserError) as caught:
        layout_for(run, processes)
    message = str(caught.value)
    assert f"training.global_batch_size = {batch}" in message
    assert f"training.micro_batch_size = {micro} x {processes} copies" in message
    assert "nearest global_batch_size: " in message


def test_tensor_and_pipeline_take_their_share_of_the_processes(make: Factory) -> None:
    run = make.run_config(parallel={"tensor": 2, "pipeline": 2})
    layout = layout_for(run, 8)
    assert (layout.data, layout.micro_batches, layout.processes) == (2, 2, 8)
    with pytest.raises(UserError, match=r"multiple of parallel.tensor = 2 .* nearest: 4 or 8"):
        layout_for(run, 6)
    with pytest.raises(UserError, match="nearest: 4"):
        layout_for(run, 0)


def test_given_copies_must_fit_the_processes(make: Factory) -> None:
    run = make.run_config(parallel={"data": 2})
    assert layout_for(run, 2).data == 2
    with pytest.raises(UserError, match=r"parallel.data = 2: 4 processes make 4 copies"):
        layout_for(run, 4)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda")],
)
def test_device(device: str, gpus: int, expected: str) -> None:
    assert choose_device(launch(device=device), gpus) == expected


def test_cuda_without_gpus_is_refused() -> None:
    with pytest.raises(UserError, match="shows no GPU"):
        choose_device(launch(device="cuda"), 0)


@pytest.mark.parametrize(
    ("keys", "parallel", "gpus", "expected"),
    [
        ({}, {}, 0, 1),
        ({}, {}, 1, 1),
        ({}, {}, 2, 2),
        ({}, {}, 3, 2),  # 4 micro batches do not go over 3 GPUs
        ({}, {}, 8, 4),
        ({"processes": 2}, {}, 8, 2),
        ({"processes": 2}, {}, 0, 2),
        ({"device": "cpu"}, {}, 8, 1),
        ({}, {"data": 2}, 0, 2),
        ({}, {"data": 2}, 8, 2),
        ({}, {"tensor": 2}, 8, 8),
        ({}, {"tensor": 2}, 0, 2),
    ],
)
def test_process_count(
    make: Factory, keys: dict[str, Any], parallel: dict[str, int], gpus: int, expected: int
) -> None:
    run = make.run_config(parallel=parallel)
    assert process_count(run, launch(**keys), gpus) == expected


def test_more_processes_than_gpus_are_refused(make: Factory) -> None:
    with pytest.raises(UserError, match=r"launch.processes = 4: wants 4 GPUs.* shows 2"):
        process_count(make.run_config(), launch(processes=4), 2)
    with pytest.raises(UserError, match=r"parallel.data = 4: wants 4 GPUs"):
        process_count(make.run_config(parallel={"data": 4}), launch(), 1)
    with pytest.raises(UserError, match=r"parallel.tensor x parallel.pipeline = 4"):
        process_count(make.run_config(parallel={"tensor": 4}), launch(), 2)


def test_wanted_processes_must_divide_the_batch(make: Factory) -> None:
    with pytest.raises(UserError, match="nearest number of copies: 2 or 4"):
        process_count(make.run_config(), launch(processes=3), 8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 96), micro=st.integers(1, 8), gpus=st.integers(0, 16))
def test_an_automatic_count_never_fails_and_never_rounds(
    make: Factory, batch: int, micro: int, gpus: int
) -> None:
    batch *= micro
    run = make.run_config(training={"global_batch_size": batch, "micro_batch_size": micro})
    count = process_count(run, launch(), gpus)
    layout = layout_for(run, count)
    assert 1 <= count <= max(gpus, 1)
    assert layout.data * layout.micro_batches * micro == batch
    more = [n for n in range(count + 1, gpus + 1) if (batch // micro) % n == 0]
    assert not more


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize("keys", [{}, {"processes": 3}, {"device": "cuda"}])
def test_parameters_get_the_answer_of_their_run_configuration(
    make: Factory, keys: dict[str, Any], gpus: int
) -> None:
    answers = []
    for run in (make.params(), make.run_config()):
        try:
            answers.append(process_count(run, launch(**keys), gpus))
        except UserError as refusal:
            answers.append(str(refusal))
    assert answers[0] == answers[1]


def test_state_is_sharded_over_a_part_of_the_copies(make: Factory) -> None:
    run = make.run_config(parallel={"data_shard": 2})
    assert [layout_for(run, n).data_shard for n in (2, 4)] == [2, 2]
    with pytest.raises(UserError, match=r"data_shard = 2: must divide the 3 copies .*nearest: 1 "):
        layout_for(run, 3)
    assert process_count(run, launch(), 0) == 2
    with pytest.raises(UserError, match=r"x parallel.data_shard = 2: wants 2 GPUs.* a smaller"):
        process_count(run, launch(), 1)


def test_the_interleaved_schedule_takes_any_number_of_micro_batches(make: Factory) -> None:
    run = make.run_config(parallel={"pipeline": 2, "virtual_stages": 2}, model={"num_layers": 4})
    assert layout_for(run, 4).micro_batches == 2
    assert layout_for(run, 4).virtual_stages == 2
    assert layout_for(run, 8).micro_batches == 1


RAMPUP = {
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "rampup_start_batch_size": 4,
    "rampup_increment": 6,
    "rampup_samples": 24,
    "train_iters": None,
    "train_samples": 36,
}


def test_every_batch_of_a_rampup_must_divide(make: Factory) -> None:
    run = make.run_config(training=RAMPUP)
    assert layout_for(run, 2).micro_batches == 8
    with pytest.raises(UserError, match=r"rampup_increment = 6: .*nearest number of copies: 2 "):
        layout_for(run, 4)
    with pytest.raises(UserError, match=r"rampup_start_batch_size = 4: must be divisible by"):
        layout_for(run, 8)
    assert process_count(run, launch(), 8) == 2


def test_micro_batches_of_every_phase_must_divide(make: Factory) -> None:
    data = {"phases": [{"from_samples": 8, "seq_length": 32, "micro_batch_size": 4}]}
    for run in (make.params(data=data), make.run_config(data=data)):
        assert layout_for(run, 2).micro_batches == 2
        with pytest.raises(UserError, match=r"data\.phases\[0\]\.micro_batch_size = 4 x 4 copies"):
            layout_for(run, 4)
        assert process_count(run, launch(), 8) == 2


@pytest.mark.parametrize(
    ("keys", "parallel", "gpus", "nodes", "expected"),
    [
        ({}, {}, 0, 2, 1),
        ({}, {}, 2, 2, 2),
        ({}, {}, 8, 2, 2),  # 4 micro batches: two processes on each
        ({}, {"tensor": 4}, 2, 2, 2),  # a layer over two machines is slow, but legal
        ({}, {"tensor": 2}, 0, 4, 1),
        ({}, {"data": 4}, 8, 2, 2),
        ({"processes": 2}, {}, 8, 2, 2),
        ({}, {"data_shard": 2}, 8, 2, 2),
    ],
)
def test_processes_of_one_of_several_nodes(
    make: Factory,
    keys: dict[str, Any],
    parallel: dict[str, int],
    gpus: int,
    nodes: int,
    expected: int,
) -> None:
    run = make.run_config(parallel=parallel)
    assert process_count(run, launch(**keys), gpus, nodes) == expected
    layout_for(run, expected * nodes)


def test_nodes_that_do_not_fit_are_refused(make: Factory) -> None:
    with pytest.raises(UserError, match=r"data = 4: makes 4 processes.* nearest parallel.data: 3 "):
        process_count(make.run_config(parallel={"data": 4}), launch(), 8, 3)
    with pytest.raises(UserError, match=r"global_batch_size = 8: must be divisible by .* x 3 cop"):
        process_count(make.run_config(), launch(), 8, 3)
    with pytest.raises(UserError, match=r"global_batch_size = 8: must be divisible by .* x 8 cop"):
        process_count(make.run_config(), launch(processes=4), 8, 2)


def is_legal(shape: dict[str, Any]) -> bool:
    """Whether a layout can be built, in the words of the contract."""
    tensor, stages, chunks = shape["tensor"], shape["pipeline"], shape["virtual_stages"]
    heads, groups = shape["num_attention_heads"], shape["num_query_groups"]
    padded = -(-300 // shape["vocab_size_multiple"]) * shape["vocab_size_multiple"]
    copies = shape["data"] or shape["data_shard"] or 1
    rest = shape["global_batch_size"] % (shape["micro_batch_size"] * copies)
    split = shape["layers_per_chunk"]
    return all(
        (
            heads % tensor == 0,
            (shape["ffn_hidden_size"] or 4 * heads * 8) % tensor == 0,
            padded % tensor == 0,
            groups is None or heads % groups == 0,
            groups is None or groups % tensor == 0 or tensor % groups == 0,
            not shape["sequence"] or (tensor > 1 and shape["seq_length"] % tensor == 0),
            stages * chunks <= shape["num_layers"],
            chunks == 1 or stages > 1,
            rest == 0,
            split is None or (len(split) == stages * chunks and sum(split) == shape["num_layers"]),
            copies % (shape["data_shard"] or 1) == 0,
        )
    )


FACTORS = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
SHAPES = st.fixed_dictionaries(
    {
        "tensor": FACTORS,
        "pipeline": FACTORS,
        "data": st.none() | FACTORS,
        "sequence": st.booleans(),
        "virtual_stages": FACTORS,
        "layers_per_chunk": st.none() | st.lists(FACTORS, min_size=1, max_size=6),
        "sharding": st.sampled_from(["optimizer", "gradients", "parameters"]),
        "data_shard": st.none() | FACTORS,
        "num_layers": st.sampled_from([2, 4, 6, 8, 12]),
        "num_attention_heads": st.sampled_from([4, 6, 12]),
        "num_query_groups": st.none() | FACTORS,
        "ffn_hidden_size": st.sampled_from([None, None, 36, 48, 50]),
        "vocab_size_multiple": st.sampled_from([1, 12, 128]),
        "seq_length": st.sampled_from([12, 16]),
        "micro_batch_size": FACTORS,
        "global_batch_size": st.sampled_from([8, 12, 24, 48]),
    }
)
SECTIONS = {
    "parallel": ("tensor", "pipeline", "data", "sequence", "virtual_stages", "layers_per_chunk",
                 "sharding", "data_shard"),
    "model": ("num_layers", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
              "vocab_size_multiple"),
    "training": ("seq_length", "micro_batch_size", "global_batch_size"),
}  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=250)
@given(shape=SHAPES)
def test_a_parallel_section_breaks_a_rule_or_has_a_layout(
    make: Factory, shape: dict[str, Any]
) -> None:
    keys = {section: {key: shape[key] for key in keys} for section, keys in SECTIONS.items()}
    keys["model"]["hidden_size"] = 8 * shape["num_attention_heads"]
    params = make.params(**keys)
    problems = broken_rules({**vars(params), "vocab_size": 300})
    assert (not problems) == is_legal(shape)
    if problems:
        assert all(problem.rule and problem.remedy for problem in problems)
        return
    copies = shape["data"] or shape["data_shard"] or 1
    layout = layout_for(params, shape["tensor"] * shape["pipeline"] * copies)
    assert layout.data == copies
    samples = layout.data * layout.micro_batches * shape["micro_batch_size"]
    assert samples == shape["global_batch_size"]
    assert layout.data % layout.data_shard == 0
