"""Runs the real pipeline in a scratch copy of the project.

Nothing of the project itself is touched: not its data, its state or its DVC cache.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lib.cli import die_with_parent
from lib.console import say
from lib.errors import UserError

_STAGE_LINE = re.compile(r"Running stage '([\w@]+)'")
_NOTHING_TO_DO = "Data and pipelines are up to date."
# What a project's folder holds beside its sources.
_PRODUCTS = {
    *("data", "model", "model_hf", "outputs", "results", "state", "dvc_plots", "dvc.lock"),
    *(".git", ".venv", ".hypothesis", ".pytest_cache", ".ruff_cache", ".import_linter_cache"),
}
_VARIABLES_OF_A_RUN = ("DVC_ROOT", "DVC_STAGE", "DVC_EXP_NAME", "DRYDOCK_STATE", "RANK")


@contextmanager
def scratch_copy(project: Path) -> Generator[Path, None, None]:
    """A copy of the project's sources in a temporary folder, for DVC a project without git."""
    with tempfile.TemporaryDirectory(prefix="drydock-smoke-") as folder:
        copy = Path(folder) / "project"
        for source in source_files(project):
            target = copy / source.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        run_module(copy, "dvc", "config", "--local", "core.no_scm", "true")
        yield copy


def apply_preset(project: Path, preset: str) -> None:
    """Applies ``params/PRESET.yaml`` in a scratch copy.

    Raises:
        UserError: there is no such preset.
    """
    run_module(project, "stages.apply_preset", preset)


def run_module(project: Path, module: str, *arguments: str) -> None:
    """Runs ``python -m module`` in a scratch copy, silent unless it fails.

    Raises:
        UserError: with what it wrote to standard error.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=project,
        env=workflow_environment(project),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("error: ")
        raise UserError(said or f"python -m {module} ended with status {done.returncode}")


def source_files(project: Path) -> list[Path]:
    """The project's own files: what git tracks or would; without git, all but what it writes."""
    files: list[Path] = []
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, cwd=project, capture_output=True, text=True, check=True)
        files = [project / name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        pass
    if project / "dvc.yaml" not in files:  # no git here, or that of a folder further up
        files = list(project.rglob("*"))
    return [path for path in files if path.is_file() and _is_source(path.relative_to(project))]


def _is_source(path: Path) -> bool:
    if path.parts[0] == ".dvc":
        return path.name in ("config", ".gitignore")
    return path.parts[0] not in _PRODUCTS and "__pycache__" not in path.parts


def workflow_environment(project: Path) -> dict[str, str]:
    """Variables to run DVC with: this Python first, and nothing kept outside the project."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_A_RUN
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["DVC_SITE_CACHE_DIR"] = str(project.parent / "site_cache")
    return environment


@dataclass(frozen=True)
class PipelineRun:
    """What a ``dvc repro`` did.

    Attributes:
        seconds: of each stage that ran (``STAGE@NAME`` where it has one instance for each corpus);
            a stage restored from the cache did not.
        up_to_date: DVC found nothing to do.
    """

    seconds: dict[str, float]
    up_to_date: bool

    @property
    def stages(self) -> list[str]:
        """The stages that ran, in order."""
        return list(self.seconds)


def run_pipeline(project: Path, *targets: str) -> PipelineRun:
    """Runs ``dvc repro``, of all stages or up to some, passing its output on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", *targets],
        cwd=project,
        env=workflow_environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    begins: dict[str, float] = {}
    nothing_to_do = False
    for line in process.stdout:
        say(line.rstrip())
        nothing_to_do |= _NOTHING_TO_DO in line
        if found := _STAGE_LINE.search(line):
            begins[found.group(1)] = time.monotonic()
    if process.wait() != 0:
        raise UserError(f"dvc repro ended with status {process.returncode}")
    moments = [*begins.values(), time.monotonic()]
    pairs = zip(begins, pairwise(moments), strict=True)
    return PipelineRun({stage: end - begin for stage, (begin, end) in pairs}, nothing_to_do)
