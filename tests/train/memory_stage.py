"""stages.pretrain whose workers fail at once, as MEMORY_STAGE_RANKS says: a JSON object.

By rank: ``memory`` (torch's own error, with a GPU's message), ``peer`` (fails over the one that
lacks memory, but tells it first), ``wait`` (for the others), or what else to say in an error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import stages.pretrain
from lib.train.launch import launch
from lib.train.worker import CRASH, LAUNCH_DIR_VARIABLE, worker_session
from tests.plan.test_remedies import MESSAGE


def fail_as_told(rank: str, kind: str) -> None:
    crashes, imported = Path(os.environ[LAUNCH_DIR_VARIABLE]), Path("imported")
    if kind == "memory":
        import torch

        imported.touch()
        wait_while(lambda: "peer" in kinds().values() and not any(crashes.glob(f"{CRASH}.*")))
        raise torch.OutOfMemoryError(MESSAGE)
    if kind == "peer":  # is heard first
        wait_while(lambda: not imported.exists())
        raise ConnectionError("Connection closed by peer")
    if kind != "wait":
        raise RuntimeError(kind)
    time.sleep(60)


def wait_while(condition: Callable[[], bool]) -> None:
    while condition():
        time.sleep(0.02)


def kinds() -> dict[str, str]:
    return json.loads(os.environ["MEMORY_STAGE_RANKS"])


def train_as_worker(*_inputs: object) -> None:
    with worker_session():
        fail_as_told(os.environ["RANK"], kinds()[os.environ["RANK"]])


def launch_this(_module, arguments, options) -> int:
    return launch("tests.train.memory_stage", arguments, options)


if __name__ == "__main__":
    sys.argv[0] = stages.pretrain.__file__
    stages.pretrain.train_as_worker = train_as_worker
    stages.pretrain.launch = launch_this
    stages.pretrain.main()
