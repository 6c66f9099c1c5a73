"""Kills at five moments across the stages, each followed by a rerun, change not one bit.

The real pipeline with tiny parameters runs twice in scratch copies: once undisturbed, and once
killed in every way that happens (DVC alone, the whole group, a worker, Ctrl-C, the group again).
"""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lib.workflow.scratch import (
    apply_preset,
    run_module,
    run_pipeline,
    scratch_copy,
    workflow_environment,
)
from tests.processes import alive, by_role, family_of, kill_all, wait_until

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 80
PRESET = f"""training: {{train_iters: {ITERATIONS}, eval_interval: 20}}
schedule: {{decay_iters: {ITERATIONS}}}
checkpoint: {{save_interval: 5}}
"""
SAME_BYTES = (
    "data/raw/corpus-00000.jsonl.zst",
    "data/tokenizer/tokenizer.json",
    "data/tokens/corpus_text_document.bin",
    "data/tokens/corpus_text_document.idx",
    "outputs/run_config.json",
    "model/model.safetensors",
    "results/validation.csv",
    "results/evaluate.json",
    "results/loss_by_position.csv",
    "results/samples.md",
)
MEASURED = {"step_ms", "data_wait_ms", "tokens_per_second", "samples_per_second"}
MEASURED |= {"tflops_per_gpu", "mfu"}


@pytest.fixture
def projects() -> Iterator[Callable[[], Path]]:
    """Makes scratch copies whose training is long enough to be hit."""
    open_copies = []

    def make() -> Path:
        open_copies.append(scratch_copy(ROOT))
        project = open_copies[-1].__enter__()
        apply_preset(project, "smoke")
        (project / "params" / "kills.yaml").write_text(PRESET)
        apply_preset(project, "kills")
        return project

    yield make
    for copy in open_copies:
        copy.__exit__(None, None, None)


def start_pipeline(project: Path) -> "subprocess.Popen[bytes]":
    """What a person does after a kill: the one safe command for a stale lock, and the rerun."""
    run_module(project, "stages.unlock_workflow")
    with (project / "repro.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro"],
            cwd=project,
            env=workflow_environment(project),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def run_until(
    project: Path,
    moment: Callable[[], bool],
    kill: Callable[["subprocess.Popen[bytes]", list[psutil.Process]], None],
) -> None:
    """Starts the pipeline, kills at a moment, and waits until nobody of the family is left."""
    process = start_pipeline(project)
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: moment() or process.poll() is not None, seconds=120, pause=0.002)
        assert process.poll() is None, (project / "repro.log").read_text()
        family = family_of(process.pid)
        kill(process, family)
        wait_until(lambda: not any(alive(member) for member in family))
    finally:
        kill_all(family)
        process.wait()


def kill_dvc(process: "subprocess.Popen[bytes]", _family: list[psutil.Process]) -> None:
    process.kill()


def kill_group(process: "subprocess.Popen[bytes]", _family: list[psutil.Process]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def kill_worker(_process: "subprocess.Popen[bytes]", family: list[psutil.Process]) -> None:
    by_role(family)["worker"].kill()


def interrupt(process: "subprocess.Popen[bytes]", _family: list[psutil.Process]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def rows(project: Path) -> list[dict[str, str]]:
    table = project / "results" / "train.csv"
    if not table.is_file():
        return []
    with table.open() as file:
        return list(csv.DictReader(file))


def evaluating(project: Path) -> bool:
    if not (project / "model" / "model.safetensors").is_file():
        return False
    time.sleep(0.01)
    return "stages.evaluate" in (project / "repro.log").read_text().rpartition("Running stage")[2]


def test_kills_change_nothing(projects: Callable[[], Path]) -> None:
    calm, killed = projects(), projects()
    run_pipeline(calm)

    run_until(killed, lambda: (killed / "data" / "raw.partial").exists(), kill_dvc)
    run_until(killed, lambda: (killed / "data" / "tokens.partial").exists(), kill_group)
    run_until(killed, lambda: len(rows(killed)) >= 12, kill_worker)
    assert 12 <= len(rows(killed)) < ITERATIONS
    run_until(killed, lambda: len(rows(killed)) >= 30, interrupt)
    assert 30 <= len(rows(killed)) < ITERATIONS
    run_until(killed, lambda: evaluating(killed), kill_group)
    run_module(killed, "stages.unlock_workflow")
    log = (killed / "repro.log").read_text()
    assert log.count("continuing from iteration") == 2
    assert "stopped: " in log
    assert run_pipeline(killed).stages == ["evaluate"]

    for name in SAME_BYTES:
        assert (calm / name).read_bytes() == (killed / name).read_bytes(), name
    kept = [column for column in rows(calm)[0] if column not in MEASURED]
    assert [row["step"] for row in rows(killed)] == [str(n) for n in range(1, ITERATIONS + 1)]
    for one, other in zip(rows(calm), rows(killed), strict=True):
        assert [one[column] for column in kept] == [other[column] for column in kept]
    assert run_pipeline(killed).up_to_date
