"""The measurement of checkpoints: its arithmetic, and all of it on a tiny model."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from lib.workflow.checkpoint_speed import Figures
from stages import measure_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--layers", "1", "--hidden", "32", "--rounds", "2")

# Its ranks are those that other tests use too.
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture
def params(tmp_path, monkeypatch):
    """The project's parameters with short sequences; states go to a folder of the test."""
    monkeypatch.setenv("DRYDOCK_STATE", str(tmp_path / "state"))
    text = (ROOT / "params.yaml").read_text()
    for old, new in (("seq_length: 256 ", "seq_length: 8 "), ("_size: 8 ", "_size: 1 ")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return path


def measure(params, *arguments):
    return CliRunner().invoke(measure_checkpoint.main, ["--params", str(params), *arguments])


def assert_sound(figures, params, processes):
    named = {field.name: figures[field.name] for field in fields(Figures)}
    assert all(value > 0 for value in named.values())
    # 4096 + 8 rows of 32, one layer of 64 + 12 x 32 x 32 and its biases, in fp32 with two moments.
    payload = 12 * (4104 * 32 + 12832)
    assert payload < figures["bytes"] < 1.5 * payload
    assert figures["files"] == processes + 3  # and .metadata, state.json, manifest.json
    assert (figures["device"], figures["processes"]) == ("cpu", processes)
    assert list((params.parent / "state").iterdir()) == []


def test_rates_and_ratios_follow_from_bytes_and_seconds():
    figures = Figures(
        bytes=8_000_000_000,
        files=4,
        streams=16,
        step=0.25,
        step_meanwhile=0.3,
        save=8.0,
        first_stall=2.0,
        stall=0.2,
        on_disk=10.0,
        verify=1.0,
        read=3.0,
        write_one=8.0,
        write_many=4.0,
        read_one=4.0,
        read_many=2.0,
    )
    assert [row[1:] for row in figures.rows()] == [
        ("0.250", "", ""),
        ("0.300", "", "1.20 x"),
        ("8.000", "1", "0.50"),
        ("0.200", "40", ""),
        ("2.000", "4", ""),
        ("10.000", "0.8", "0.40"),
        ("4.000", "2", "0.50"),
        ("1.000", "8", "2.00"),
        ("3.000", "2.67", "0.67"),
        ("8.000", "1", ""),
        ("4.000", "2", ""),
        ("4.000", "2", ""),
        ("2.000", "4", ""),
    ]
    assert "by 16, as many as a save has" in figures.rows()[10][0]


def test_one_process_measures_a_tiny_model(params):
    done = measure(params, *TINY, "--json")
    assert done.exit_code == 0, done.output
    assert_sound(json.loads(done.stdout), params, processes=1)


@pytest.mark.layouts
def test_processes_of_torchrun_measure_a_tiny_model(params):
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "stages.measure_checkpoint", "--params", str(params), *TINY]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_sound(json.loads(done.stdout), params, processes=2)


def test_what_cannot_be_measured_is_refused_before_processes_start(params):
    done = measure(params, "--preset", "lama")
    assert done.exit_code == 1
    assert "lama: no such preset" in done.stderr
    params.write_text(params.read_text().replace("  tensor: 1 ", "  tensor: 3 "))
    done = measure(params, "--hidden", "128")
    assert done.exit_code == 1
    assert "model.num_attention_heads" in done.stderr
    assert "must be divisible by parallel.tensor = 3" in done.stderr
