"""What a project's surroundings say: each stage's code by dvc.yaml, and where states live.

The code is what dvc.yaml declares, since DVC reruns a stage by the same list; ``make check`` holds
the list against what each stage really imports.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lib.errors import UserError

CODE_FOLDERS = ("stages", "lib", "kernels")


def state_root() -> Path:
    """Where states live: beside the original project, also in DVC's temporary experiments."""
    chosen = os.environ.get("DRYDOCK_STATE")
    return Path(chosen) if chosen else Path(os.environ.get("DVC_ROOT", ".")) / "state"


def original_path(path: str) -> Path:
    """A file that no stage makes: DVC's temporary experiments have no copy of it either."""
    return Path(os.environ.get("DVC_ROOT", ".")) / path


def declared_code(workflow: Path) -> dict[str, tuple[Path, ...]]:
    """For each stage the dependencies that are code: files and folders, as declared.

    Args:
        workflow: ``dvc.yaml``.

    Raises:
        UserError: the file cannot be read or is no workflow.
    """
    try:
        stages = YAML(typ="safe").load(workflow.read_text(encoding="utf-8"))["stages"]
        return {
            # A stage of several instances, `foreach`, has its definition under `do`.
            name: tuple(_code_among(stage.get("do", stage).get("deps") or ()))
            for name, stage in stages.items()
        }
    except FileNotFoundError:
        raise UserError(
            f"{workflow}: no such file; run from the project's folder, where dvc.yaml is"
        ) from None
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{workflow}: cannot be read ({reason})") from None
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{workflow}: not a workflow: 'stages:' must map names to stages") from None


def stage_code(workflow: Path, stage: str) -> tuple[Path, ...]:
    """The code among the dependencies of one stage.

    Raises:
        UserError: the file cannot be read or has no such stage.
    """
    declared = declared_code(workflow)
    if stage not in declared:
        raise UserError(f"{workflow}: has no stage {stage}; it has: {', '.join(declared)}")
    return declared[stage]


def _code_among(dependencies: Iterable[object]) -> list[Path]:
    """Paths below the code's folders; DVC also takes dependencies with settings, which are data."""
    paths = [Path(name) for name in dependencies if isinstance(name, str)]
    return [path for path in paths if path.parts and path.parts[0] in CODE_FOLDERS]
