"""Steps on a GPU are timed without a wait between them; on a queue that is made up."""

import pytest
import torch

from lib.workflow.step_figures import TimingPlan
from lib.workflow.step_timing import time_steps
from tests.workflow.fake_gpu import FakeGpu

CUDA = torch.device("cuda", 0)


def test_the_host_waits_once_for_all_steps(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    durations = iter([9.0, 8.0, 1.0, 2.0, 4.0])
    waits = []

    def step():
        waits.append(gpu.waits)
        gpu.work(next(durations))
        return torch.tensor(float(len(waits)))

    found = time_steps({"ours": step}, TimingPlan(warmup=2, steps=3), CUDA, rank=0)["ours"]
    assert found.seconds == pytest.approx([1.0, 2.0, 4.0])
    assert waits == [0] * 5
    assert gpu.waits == 1
    assert found.losses == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(isinstance(loss, float) for loss in found.losses)
    assert found.peak_bytes == 7


def test_ways_in_turns_are_told_apart(monkeypatch):
    gpu = FakeGpu(monkeypatch)

    def step_of(seconds):
        def step():
            gpu.work(seconds)
            return 0.0

        return step

    ways = {"slow": step_of(3.0), "fast": step_of(1.0)}
    found = time_steps(ways, TimingPlan(warmup=1, steps=2), CUDA, rank=0)
    assert found["slow"].seconds == pytest.approx([3.0, 3.0])
    assert found["fast"].seconds == pytest.approx([1.0, 1.0])
    assert found["slow"].peak_bytes is None
