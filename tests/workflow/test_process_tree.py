"""make -> DVC -> launcher -> torchrun -> worker: whichever dies, nobody trains on.

A toy stage stands in for pretrain and a quick program for torchrun (``tests/train``), under the
real Makefile's guard, DVC, launcher and torchrun's manners (``lib.train.agent``).
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.processes import alive, by_role, family_of, kill_all, wait_until

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["make", "dvc", "launcher", "torchrun", "worker"]
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

    def wait_for_the_end(self) -> None:
        wait_until(lambda: not any(alive(process) for process in self.family), seconds=200)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one stage, before any run."""
    folder = tmp_path_factory.mktemp("project")
    init = [sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"]
    subprocess.run(init, cwd=folder, check=True)
    settings = "[core]\nno_scm = true\nanalytics = false\ncheck_update = false\n"
    (folder / ".dvc" / "config").write_text(settings)
    (folder / "dvc.yaml").write_text(WORKFLOW)
    (folder / "toy.mk").write_text(MAKEFILE.format(root=ROOT))
    return folder


@pytest.fixture
def start(project: Path, tmp_path: Path) -> Iterator[Callable[[list[str]], Tree]]:
    """Starts trees, each in a copy of the project; kills what a failed test leaves behind."""
    trees: list[Tree] = []
    copy = tmp_path / "project"
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests" / "train"))
    environment = os.environ | {
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DVC_SITE_CACHE_DIR": str(tmp_path / "site_cache"),
        "TOY_TORCHRUN": "1",
    }

    def start_tree(command: list[str]) -> Tree:
        shutil.copytree(project, copy)
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        training = copy / "training.0"
        wait_until(lambda: training.is_file() and training.read_text() != "", seconds=200)
        trees.append(Tree(copy, process))
        return trees[-1]

    yield start_tree
    for tree in trees:
        kill_all(tree.family)
        tree.process.communicate()


@pytest.fixture
def tree(start: Callable[[list[str]], Tree]) -> Tree:
    """The tree under make: no shell stands between the five, each is the parent of the next."""
    tree = start(["make", "-f", "toy.mk", "toy"])
    assert list(tree.roles) == ORDER
    for parent, child in pairwise(ORDER):
        assert tree.roles[child].ppid() == tree.roles[parent].pid
    assert len(tree.family) == len(ORDER)
    return tree


@pytest.mark.parametrize("role", ORDER)
def test_killing_one_ends_all(tree: Tree, role: str) -> None:
    tree.roles[role].kill()
    tree.wait_for_the_end()
    assert tree.saved() == (role != "worker")


def test_killing_the_group_ends_all(tree: Tree) -> None:
    """As `kill -9 -PGID` does; torchrun and worker are in groups of their own."""
    os.killpg(tree.process.pid, signal.SIGKILL)
    tree.wait_for_the_end()
    assert tree.saved()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_group_saves_and_ends_all(tree: Tree, number: int) -> None:
    """What Ctrl-C, a service manager and a closed terminal do."""
    os.killpg(tree.process.pid, number)
    tree.wait_for_the_end()
    assert tree.saved()


def test_terminating_make_saves_and_ends_all(tree: Tree) -> None:
    psutil.Process(tree.process.pid).terminate()
    tree.wait_for_the_end()
    assert tree.saved()


def test_warning_to_everyone_saves_while_dvc_waits(start: Callable[[list[str]], Tree]) -> None:
    """Slurm's SIGUSR1, as docs/clusters.md has it: DVC, which would die of it, is told not to.

    When the first process of a Slurm task ends, Slurm kills the others, be they saving or not.
    """
    tree = start(["sh", "-c", "trap '' USR1; exec dvc repro"])
    for process in tree.family:
        process.send_signal(signal.SIGUSR1)
    assert tree.process.wait(timeout=200) == 255
    assert tree.saved()
    tree.wait_for_the_end()
