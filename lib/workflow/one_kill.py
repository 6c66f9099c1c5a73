"""One kill of a training, in the middle of a save: what resumes must end as what was not hit."""

import shutil
from pathlib import Path

from lib.workflow.torture import Account, Truth, torture
from lib.workflow.torture_evidence import collect
from lib.workflow.torture_plan import Blow

# While the second checkpoint is half written, so that the first is what it resumes from.
_BLOW = Blow(moment="save", target="rank", signal="KILL", count=2)
# On a GPU the same bits need kernels that always sum in one order, and attention not chosen anew.
EXACT = "runtime: {deterministic: true, attention: sdpa}\n"


def copy_before_training(project: Path) -> Path:
    """A copy of a scratch project whose pipeline has run up to training, and no further.

    Were training in its DVC cache, a later ``dvc repro`` would take it from there.
    """
    untrained = project.parent / "untrained"
    shutil.copytree(project, untrained, symlinks=True)
    return untrained


def kill_once(untrained: Path, trained: Path) -> Account:
    """Trains in a copy of a scratch project, kills a rank with SIGKILL, and resumes.

    Args:
        untrained: from ``copy_before_training``.
        trained: the project whose pipeline has run since: what is compared with.

    Returns:
        What happened; ``faults`` is empty if rows of train.csv, samples and weights are the same.

    Raises:
        UserError: the project has no finished training.
    """
    truth = Truth(collect(trained), seconds_to_begin=0.0)
    return torture(untrained, [_BLOW], truth, in_the_end=lambda _scene: [])
