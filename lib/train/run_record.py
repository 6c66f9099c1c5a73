"""What a run's model is published with: how it came to be, enough to make it again.

Command, surroundings and versions, machine, git commit with the changes on top of it, data,
parameters. Without git (a tarball) the code is known by its hash alone.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from lib.checkpoint.resume import StateRecord
from lib.config.run_config import RunConfig
from lib.train.hardware import cpu_name, cuda_device_names, usable_cores

_FORMAT = 1
# Named one by one or by family, since an environment also holds passwords and keys.
_TOLD_VARIABLES = ("WORLD_SIZE", "DVC_STAGE", "DVC_EXP_NAME", "PYTHONHASHSEED")
_TOLD_FAMILIES = ("CUDA_", "CUBLAS_", "NCCL_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "DRYDOCK_")
_DIFF_CHARACTERS = 100_000
# What decides how a run goes. The pipeline's own products (results/, dvc.lock) change with each
# run and would make every commit look changed.
_SOURCES = (
    *("stages", "lib", "kernels", "tests", "params", "params.yaml"),
    *("dvc.yaml", "Makefile", "requirements.lock", "pyproject.toml"),
)


def begin_record(params: Path, config: RunConfig) -> dict[str, object]:
    """What is true of a run when it starts; by its end, files and commits may be others.

    Args:
        params: the parameter file, kept word for word, comments included.
        config: the run configuration; data and tokenizer are told by their fingerprints.
    """
    return {
        "format": _FORMAT,
        "command": sys.orig_argv,
        "started": _moment(psutil.Process().create_time()),
        "data": config.data.model_dump(mode="json"),
        "environment": _told_environment(),
        "python": platform.python_version(),
        "packages": _package_versions(),
        "machine": _machine(),
        "git": git_state(Path.cwd()),
        "params": params.read_text(encoding="utf-8"),
    }


def finish_record(begun: dict[str, object], state: StateRecord) -> dict[str, object]:
    """The whole record of the run that ends now, ready for JSON.

    Args:
        begun: what ``begin_record`` gave at its start.
        state: the state directory's record: layout, code, and what it took over.
    """
    return begun | {
        "ended": _moment(time.time()),
        "fingerprint": state.fingerprint,
        "layout": state.layout,
        "code_sha256": state.code_hash,
        "adopted": state.adopted,
        "began_from": state.began_from,
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _told_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _TOLD_VARIABLES or name.startswith(_TOLD_FAMILIES)
    }


def _package_versions() -> dict[str, str]:
    installed = importlib.metadata.distributions()
    return dict(sorted((item.name, item.version) for item in installed))


def _machine() -> dict[str, object]:
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": list(cuda_device_names()),
    }


def git_state(project: Path) -> dict[str, object] | None:
    """Commit, and uncommitted changes of code and parameters; None where it is no git work tree.

    A project that was unpacked somewhere inside another work tree is none either.
    """
    top = _git(project, "rev-parse", "--show-toplevel")
    commit = _git(project, "rev-parse", "--verify", "HEAD")
    if top is None or commit is None or Path(top.strip()) != project.resolve():
        return None
    changes = _git(project, "status", "--porcelain", "--", *_SOURCES) or ""
    diff = _git(project, "diff", "HEAD", "--", *_SOURCES) or ""
    return {
        "commit": commit.strip(),
        "dirty": bool(changes),
        "changes": changes.splitlines(),
        "diff": diff[:_DIFF_CHARACTERS],
        "diff_is_whole": len(diff) <= _DIFF_CHARACTERS,
    }


def _git(project: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
