"""What a finished run leaves behind, and whether two runs are the same run, bit for bit.

Compared are the rows of ``results/train.csv`` but for the measured columns, the samples that each
step read, ``results/validation.csv`` and the published weights. The order of samples is a pure
function (``lib.data.order``) of the seed and of the count of consumed samples, which each row
records, so the corpora and sample numbers of a step follow from its row. That it read these and
no others shows in its loss, which is compared to the last bit.
"""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.atomic import PARTIAL_SUFFIX, sha256_of
from lib.checkpoint.lock import lock
from lib.config.run_config import RunConfig
from lib.data.order import SampleOrder
from lib.errors import UserError
from lib.workflow.torture_processes import Scene

MEASURED = frozenset(
    (
        *("step_ms", "data_wait_ms", "tokens_per_second", "samples_per_second"),
        *("tflops_per_gpu", "mfu"),
    )
)
_WEIGHTS = "model.safetensors"  # lib.checkpoint.published, which would import torch
_SHOWN = 3


@dataclass(frozen=True)
class Evidence:
    """What a finished run left.

    Attributes:
        rows: of ``train.csv``, without the measured columns, with the samples' digest added.
        validation: the bytes of ``validation.csv``.
        weights: sha256 of the published weights.
    """

    rows: list[dict[str, str]]
    validation: bytes
    weights: str


def collect(project: Path) -> Evidence:
    """Reads what a finished run left in a scratch project.

    Raises:
        UserError: something is missing.
    """
    config = RunConfig.load(project / "outputs" / "run_config.json")
    try:
        with (project / "results" / "train.csv").open(newline="") as file:
            rows = [
                {name: text for name, text in row.items() if name not in MEASURED}
                for row in csv.DictReader(file)
            ]
        validation = (project / "results" / "validation.csv").read_bytes()
        weights = sha256_of(project / "model" / _WEIGHTS)
    except OSError as error:
        raise UserError(f"the run left no whole result: {error}") from None
    order = SampleOrder.of_phases(config.data.phases, config.training.seed)
    for row in rows:
        row["samples"] = samples_of(row, order)
    return Evidence(rows, validation, weights)


def samples_of(row: dict[str, str], order: SampleOrder) -> str:
    """A digest of the corpora and sample numbers that a step read, in their order."""
    end, size = int(row["consumed_samples"]), int(row["global_batch_size"])
    drawn = np.stack(order.samples_at(np.arange(end - size, end, dtype=np.int64)))
    return hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()[:16]


def differences(truth: Evidence, found: Evidence) -> list[str]:
    """Where a run is not the one that was left alone; the first few of each kind."""
    wanted = [row["step"] for row in truth.rows]
    steps = [row["step"] for row in found.rows]
    if steps != wanted:
        return [f"train.csv has {_odd_steps(wanted, steps)}"]
    faults = [
        f"step {row['step']}: {name} is {other[name]}, was {row[name]} when left alone"
        for row, other in zip(truth.rows, found.rows, strict=True)
        for name in row
        if row[name] != other.get(name)
    ]
    if len(faults) > _SHOWN:
        faults = [*faults[:_SHOWN], f"and {len(faults) - _SHOWN} more values of train.csv"]
    if truth.validation != found.validation:
        faults.append("validation.csv is not the same")
    if truth.weights != found.weights:
        faults.append(f"the weights are {found.weights[:16]}, not {truth.weights[:16]}")
    return faults


def _odd_steps(wanted: Sequence[str], steps: Sequence[str]) -> str:
    missing = [step for step in wanted if step not in set(steps)]
    twice = sorted({step for step in steps if steps.count(step) > 1}, key=int)
    unknown = [step for step in steps if step not in set(wanted)]
    parts = [
        f"{what} {', '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
        for what, names in (("no step", missing), ("twice step", twice), ("in excess", unknown))
        if names
    ]
    return "; ".join(parts) or "its steps in another order"


def leftovers(scene: Scene, most_checkpoints: int) -> list[str]:
    """What a finished run should not leave: halves, old checkpoints, a lock that is held."""
    faults = [
        f"left behind: {path.relative_to(scene.project)}"
        for folder in ("state", "model", "results", ".")
        for path in (scene.project / folder).glob("**/*" if folder != "." else "*")
        if PARTIAL_SUFFIX in path.name
    ]
    states = [path.name for path in (scene.project / "state").iterdir() if path.is_dir()]
    if states != [scene.state.name]:
        faults.append(f"another state was begun: {', '.join(sorted(states))}")
    kept = sorted(path.name for path in scene.state.glob("iter_*"))
    if len(kept) > most_checkpoints:
        faults.append(f"{len(kept)} checkpoints instead of {most_checkpoints}: {', '.join(kept)}")
    try:
        with lock(scene.state, wait_s=0):
            pass
    except UserError as held:
        faults.append(str(held))
    return faults


def forgotten_files(scene: Scene) -> tuple[int, int]:
    """Files that killed processes left in their temporary folder: how many, and their bytes."""
    files = [path for path in scene.temporary.rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)
