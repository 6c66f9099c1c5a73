"""Scratch projects for the torture: one is prepared, each run gets a copy of its own.

Every scene has its own sources, data, state, DVC cache and temporary folder, so nothing of the
project is touched and no scene sees another's results.
"""

import os
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.checkpoint.resume import state_path
from lib.config.run_config import RunConfig
from lib.workflow.scratch import apply_preset, run_module, scratch_copy
from lib.workflow.torture_processes import PATIENCE_S, Scene, Start

KEEP_LAST = 2
_PRESET = "torture"


@dataclass(frozen=True)
class Length:
    """How long a run under torture is.

    Attributes:
        steps: optimizer steps.
        save_interval: steps between two checkpoints.
        processes: ranks, which share the batch.
    """

    steps: int = 240
    save_interval: int = 10
    processes: int = 2

    def preset(self) -> str:
        """The parameters, on top of the preset ``smoke``.

        With dropout, so that a random stream that is not continued shows; with one thread, since
        the number of threads changes the last digits.
        """
        return f"""model: {{attention_dropout: 0.1, hidden_dropout: 0.1}}
schedule: {{decay_iters: {self.steps}}}
training:
  train_iters: {self.steps}
  eval_interval: {4 * self.save_interval}
  micro_batch_size: 2
checkpoint: {{save_interval: {self.save_interval}, keep_last: {KEEP_LAST}}}
launch: {{device: cpu, processes: {self.processes}, threads: 1, stop_timeout_s: 120}}
runtime: {{log_interval: {self.save_interval}}}
"""


@contextmanager
def prepared_project(project: Path, length: Length) -> Generator[Path]:
    """A scratch copy whose tokens and run configuration are ready, for as long as this lasts.

    Raises:
        UserError: a stage before pretrain failed.
    """
    with scratch_copy(project) as copy:
        apply_preset(copy, "smoke")
        (copy / "params" / f"{_PRESET}.yaml").write_text(length.preset())
        apply_preset(copy, _PRESET)
        run_module(copy, "dvc", "repro", "--quiet", "validate_config")
        yield copy


def new_scene(prepared: Path, name: str) -> Scene:
    """A fresh copy of the prepared project, beside it."""
    project = prepared.parent / name / "project"
    shutil.copytree(prepared, project, symlinks=True)
    config = RunConfig.load(project / "outputs" / "run_config.json")
    return Scene(project, state_path(project / "state", config))


def copy_scene(scene: Scene, name: str) -> Scene:
    """A copy of a scene as it stands, its state included; nothing may run in it."""
    project = scene.project.parent.parent / name / "project"
    shutil.copytree(scene.project, project, symlinks=True)
    return Scene(project, project / "state" / scene.state.name)


def remove_scene(scene: Scene) -> None:
    """Removes a scene with all that lies beside its project."""
    shutil.rmtree(scene.project.parent)


def unlock_if_spoilt(scene: Scene) -> bool:
    """Mends the lock file that a kill in the moment of writing left empty; True if it did.

    That is DVC's own fault, and ``make unlock`` is its documented remedy.
    """
    path = scene.project / ".dvc" / "tmp" / "rwlock"
    if not path.is_file() or path.read_text(errors="replace").strip().endswith("}"):
        return False
    run_module(scene.project, "stages.unlock_workflow")
    return True


def pipeline_goes_on(scene: Scene) -> list[str]:
    """Kills ``dvc repro`` in the stage after training, and runs it twice; what is wrong, if any.

    The second run must not train again, the third must have nothing to do.
    """
    killed = Start(scene, "pipeline")
    try:
        killed.wait(lambda: "Running stage 'evaluate'" in killed.said(), PATIENCE_S)
        os.killpg(killed.process.pid, signal.SIGKILL)
        left = killed.wait_for_end(PATIENCE_S)
    finally:
        killed.end()
    if left:
        return [f"dvc repro was killed in evaluate, but still there: {'; '.join(left)}"]
    unlock_if_spoilt(scene)
    for pattern in ("Running stage 'evaluate'", "Data and pipelines are up to date"):
        again = Start(scene, "pipeline")
        again.process.wait()
        said = again.said()
        if again.process.returncode != 0 or pattern not in said or "'pretrain':" in said:
            return [f"dvc repro does not simply go on: {again.last_words()}"]
    return []


def keep_for_inspection(scene: Scene) -> Path:
    """Moves a scene out of the folder that is about to be removed; gives its new place."""
    kept = Path(f"{scene.project.parent.parent}-kept") / scene.project.parent.name
    kept.parent.mkdir(exist_ok=True)
    shutil.move(scene.project.parent, kept)
    return kept
