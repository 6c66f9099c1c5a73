"""make -> DVC -> launcher -> torchrun -> worker: whichever dies, nobody trains on.

A toy stage stands in for pretrain, under the real Makefile's guard, DVC, launcher and torchrun.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.processes import alive, by_role, family_of, kill_all, wait_until

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = """stages:
  train:
    cmd: exec python -m toy_stage train . 1 - 20
    outs: [model]
"""
MAKEFILE = """include {root}/Makefile
toy:
\t@exec $(GUARD) dvc repro
"""


class Tree:
    """A running tree of processes, by role."""

    def __init__(self, project: Path, process: "subprocess.Popen[str]") -> None:
        self.project = project
        self.process = process
        self.family = family_of(process.pid)
        self.roles = by_role(self.family)

    def saved(self) -> bool:
        return (self.project / "saved.0").is_file()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests" / "train"))
    environment = os.environ | {
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DVC_SITE_CACHE_DIR": str(tmp_path / "site_cache"),
    }
    (tmp_path / "dvc.yaml").write_text(WORKFLOW)
    (tmp_path / "toy.mk").write_text(MAKEFILE.format(root=ROOT))
    init = [sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"]
    subprocess.run(init, cwd=tmp_path, env=environment, check=True)
    process = subprocess.Popen(
        ["make", "-f", "toy.mk", "toy"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    training = tmp_path / "training.0"
    wait_until(lambda: training.is_file() and training.read_text() != "")
    tree = Tree(tmp_path, process)
    yield tree
    kill_all(tree.family)
    process.communicate()


def test_tree_is_the_one_that_is_told_of(tree: Tree) -> None:
    """No shell stands between the five, and each is the parent of the next."""
    order = ["make", "dvc", "launcher", "torchrun", "worker"]
    assert list(tree.roles) == order
    for parent, child in pairwise(order):
        assert tree.roles[child].ppid() == tree.roles[parent].pid
    assert len(tree.family) == len(order)


@pytest.mark.parametrize("role", ["make", "dvc", "launcher", "torchrun", "worker"])
def test_killing_one_ends_all(tree: Tree, role: str) -> None:
    tree.roles[role].kill()
    wait_until(lambda: not any(alive(process) for process in tree.family), seconds=30)
    assert tree.saved() == (role != "worker")


def test_killing_the_group_ends_all(tree: Tree) -> None:
    """As `kill -9 -PGID` does; torchrun and worker are in groups of their own."""
    os.killpg(tree.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(alive(process) for process in tree.family), seconds=30)
    assert tree.saved()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_group_saves_and_ends_all(tree: Tree, number: int) -> None:
    """What Ctrl-C, a service manager and a closed terminal do."""
    os.killpg(tree.process.pid, number)
    wait_until(lambda: not any(alive(process) for process in tree.family), seconds=30)
    assert tree.saved()


def test_terminating_make_saves_and_ends_all(tree: Tree) -> None:
    psutil.Process(tree.process.pid).terminate()
    wait_until(lambda: not any(alive(process) for process in tree.family), seconds=30)
    assert tree.saved()
