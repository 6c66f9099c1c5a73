"""Which files are a stage's code: what dvc.yaml says, since DVC reruns the stage by the same list.

A test holds that list against what the stage really imports.
"""

from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lib.errors import UserError

_CODE_FOLDERS = ("stages", "lib", "kernels")


def stage_code(workflow: Path, stage: str) -> tuple[Path, ...]:
    """Code among the dependencies of a stage: files and folders.

    Args:
        workflow: ``dvc.yaml``.
        stage: the stage's name in it.

    Raises:
        UserError: the file cannot be read or has no such stage.
    """
    try:
        stages = YAML(typ="safe").load(workflow.read_text())["stages"]
        dependencies = stages[stage]["deps"]
    except (OSError, YAMLError, KeyError, TypeError) as error:
        raise UserError(
            f"{workflow}: the dependencies of stage {stage} cannot be read ({error}); run from "
            "the project's folder"
        ) from None
    return tuple(
        Path(dependency)
        for dependency in dependencies
        if isinstance(dependency, str) and Path(dependency).parts[0] in _CODE_FOLDERS
    )
