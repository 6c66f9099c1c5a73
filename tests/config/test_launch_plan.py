"""Processes and layout: everything divides, or is refused with the numbers."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.config.launch_plan import Layout, choose_device, layout_for, process_count
from lib.config.operation import LaunchConfig
from lib.errors import UserError
from tests.config.conftest import Factory


def launch(**keys: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(keys)


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_layouts_that_divide(make: Factory, processes: int, micro_batches: int) -> None:
    layout = layout_for(make.run_config(), processes)  # global batch 8, micro batch 2
    assert layout == Layout(1, 1, processes, micro_batches)
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
    assert layout_for(run, 8) == Layout(2, 2, 2, 2)
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
