"""A run that dies of memory says what filled it, by the real launcher and real workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.config.run_config import resolve
from lib.config.schema import ParallelConfig
from lib.train.memory_crash import explain_memory_error, memory_error
from lib.train.random_tokens import random_tokens
from lib.workflow.shapes import REFERENCES, documents_for, measured_run
from tests.plan.test_remedies import MESSAGE

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = {"runtime": {"attention": "auto"}, "launch": {"device": "cpu", "processes": 2}}


@pytest.fixture
def folder(tmp_path):
    """The 1.4B model over two pipeline stages; nothing of it is built."""
    shape = REFERENCES["1.4b"]
    run = measured_run(shape, ParallelConfig(data=1, pipeline=2), "fp32")
    config = resolve(
        run, random_tokens(tmp_path, run, shape.vocab_size, documents_for(shape, 1, 1))
    )
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "run_config.json").write_text(config.to_json())
    sections = {
        name: part.model_dump(mode="json") for name, part in vars(run).items() if name != "corpora"
    }
    sections["corpora"] = {name: {} for name in run.corpora}
    (tmp_path / "params.yaml").write_text(json.dumps(sections | RUNTIME))
    return tmp_path


def pretrain(folder, *kinds):
    """Exit status, and the lines of standard error from the error on."""
    told = {str(rank): kind for rank, kind in enumerate(kinds)}
    environment = {"PYTHONPATH": str(ROOT), "MEMORY_STAGE_RANKS": json.dumps(told)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.memory_stage"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = done.stderr.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return done.returncode, lines[start:]


@pytest.mark.parametrize(
    "kinds",
    [pytest.param(("wait", "memory"), marks=pytest.mark.layouts), ("peer", "memory")],
)
def test_what_filled_the_memory_of_the_rank_that_died(folder, kinds):
    status, lines = pretrain(folder, *kinds)
    assert status == 1
    assert lines[0].startswith("error: rank 1 failed: torch.OutOfMemoryError: CUDA out of")
    assert lines[1] == (
        "  out of memory: 1.53 GiB more were wanted of 44.40 GiB, of which tensors held 38.50 GiB"
    )
    assert lines[2].startswith("  stage 1 needs ")
    assert lines[3].startswith("  process 4711 on the same GPU holds 2.00 GiB")
    assert lines[5].startswith("  training.micro_batch_size: 4 saves ")
    assert "expandable_segments" in lines[-1]
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.layouts
def test_several_ranks_that_died_are_told_once(folder):
    status, lines = pretrain(folder, "memory", "memory")
    assert status == 1
    assert len([line for line in lines if "more were wanted" in line]) == 1


def test_other_failures_and_explainers_that_fail_say_no_more(folder):
    status, lines = pretrain(folder, "wait", "one over nothing")
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith("error: rank 1 failed: RuntimeError: one over nothing")
    report = f"Traceback ...\ntorch.OutOfMemoryError: {MESSAGE}"
    assert explain_memory_error(("stages.no_such_program",), 0, 1, report) == []
    assert explain_memory_error((), 0, 1, report) == []


# As torch, cuBLAS and NCCL write them.
LINES = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.cuda.OutOfMemoryError: CUDA out of memory",
    "RuntimeError: CUDA error: out of memory",
    "torch.AcceleratorError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Last error: Cuda failure 2 'out of memory'",
]


@pytest.mark.parametrize("line", LINES)
def test_signs(line):
    assert memory_error(f"Traceback:\n  File 'a.py'\n{line}\n") == line


@pytest.mark.parametrize(
    "report",
    ["", "  except torch.OutOfMemoryError:\nValueError: no", "RuntimeError: CUDA error: unknown"],
)
def test_no_signs(report):
    assert memory_error(report) is None
