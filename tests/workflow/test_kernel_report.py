"""What is told of timed kernels, their clock on a made-up GPU, and the command on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lib.errors import UserError
from lib.workflow import kernel_timing
from lib.workflow.kernel_report import (
    FAILED,
    HEADERS,
    NO_MEMORY,
    NOT_INSTALLED,
    Conditions,
    KernelTimes,
    kernel_rows,
    tell,
)
from lib.workflow.kernel_timing import Clock
from stages import measure_kernels
from tests.workflow.fake_gpu import FakeGpu

ROOT = Path(__file__).resolve().parents[2]
CONDITIONS = Conditions("1.4b", (8, 2048), "bf16", "some GPU", 4e12)


def norm(**without):
    times = {"drydock": 0.2, "torch": 0.6, "compiled": 0.3}
    both = {"drydock": 0.5, "torch": 1.0}
    moved = {"forward": 400_000_000, "fwd + bwd": 1_000_000_000}
    return KernelTimes("rms_norm", {"forward": times, "fwd + bwd": both}, moved, without)


def test_share_and_ratio():
    """A copy of 400 MB at 4 TB/s takes 0.1 ms."""
    first, second = kernel_rows(norm(Liger=NOT_INSTALLED, compiled=FAILED), 4e12)
    times = ("0.200", "0.600", "0.300", NOT_INSTALLED)
    assert first == ("rms_norm", "forward", *times, "50%", "1.50")
    assert second == (
        "rms_norm",
        "fwd + bwd",
        "0.500",
        "1.000",
        FAILED,
        NOT_INSTALLED,
        "50%",
        "2.00",
    )
    assert len(HEADERS) == len(first)


def test_a_kernel_that_failed_has_no_ratio():
    times = KernelTimes("softmax", {"forward": {"torch": 1.0}}, {"forward": 8}, {"drydock": FAILED})
    assert kernel_rows(times, 4e12) == [
        ("softmax", "forward", FAILED, "1.000", "", "", "", ""),
    ]
    assert times.failures() == ["softmax (drydock)"]
    nothing = KernelTimes("softmax", without={"drydock": NO_MEMORY})
    assert kernel_rows(nothing, 4e12) == [("softmax", "", NO_MEMORY, "", "", "", "", "")]
    assert nothing.failures() == []


def test_a_line_of_json_for_each_pass(tmp_path, capsys):
    path = tmp_path / "figures.jsonl"
    for _ in range(2):
        tell([norm(Liger=NOT_INSTALLED)], CONDITIONS, path)
    shown = capsys.readouterr().out
    assert "8 x 2048 tokens" in shown
    assert "4,000 GB/s" in shown
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["pass"] for line in lines] == ["forward", "fwd + bwd"] * 2
    assert lines[0] == {
        "shape": "1.4b",
        "tokens": [8, 2048],
        "dtype": "bf16",
        "device": "some GPU",
        "copy_rate": 4e12,
        "kernel": "rms_norm",
        "pass": "forward",
        "milliseconds": {"drydock": 0.2, "torch": 0.6, "compiled": 0.3},
        "moved_bytes": 400_000_000,
        "without": {"Liger": NOT_INSTALLED},
    }


def test_the_longest_names_are_shown_whole(capsys):
    times = dict.fromkeys(("drydock", "torch", "compiled"), 12.345)
    found = KernelTimes("embedding_gradient", {"fwd + bwd": times}, {"fwd + bwd": 1})
    found.without["Liger"] = NOT_INSTALLED
    tell([found], CONDITIONS, None)
    shown = capsys.readouterr().out
    assert "embedding_gradient" in shown
    assert NOT_INSTALLED in shown


@pytest.fixture
def clock(monkeypatch):
    """With a queue in which each copy takes 100 s."""
    monkeypatch.setattr(kernel_timing, "_LEAST_BYTES", 64)
    gpu = FakeGpu(monkeypatch)
    found = Clock(torch.device("cpu"))
    monkeypatch.setattr(found, "_copy", lambda: gpu.work(100.0))
    return found, gpu


def test_only_the_run_itself_is_timed(clock):
    found, gpu = clock
    calls = []

    def prepare():
        gpu.work(50.0)  # of fresh inputs
        calls.append(gpu.waits)
        seconds = 1000.0 if len(calls) <= 5 else len(calls) - 5  # slow until it is compiled
        return lambda: gpu.work(seconds)

    assert found.milliseconds(prepare) == pytest.approx(1e3 * 15.5)  # of 1 to 30
    assert calls == [0] * 35


def test_a_copy_reads_and_writes(clock):
    found, _ = clock
    assert found.copy_rate() == pytest.approx(2 * 64 / 100.0)


def test_without_a_gpu_the_command_says_so_in_a_line():
    done = subprocess.run(
        [sys.executable, "-m", "stages.measure_kernels"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == [
        "kernels are measured on a GPU only, and this machine shows none"
    ]
    assert done.stderr == ""


def test_what_failed_is_told_at_the_end(monkeypatch):
    failures = {"1.4b": [], "125m": ["softmax (drydock)"]}
    monkeypatch.setattr(measure_kernels, "cuda_device_names", lambda: ("some GPU",))
    monkeypatch.setattr(measure_kernels, "_measure", lambda shape, _: failures[shape.name])
    command = measure_kernels.main.callback.__wrapped__
    command(("1.4b",), None)
    with pytest.raises(UserError, match=r"failed: 125m: softmax \(drydock\)"):
        command(("1.4b", "125m"), None)
