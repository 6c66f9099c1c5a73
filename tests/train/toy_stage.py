"""A stand-in for stages/pretrain.py: parent mode launches, worker mode obeys its first argument.

A toy of several nodes also gets how many there are, its number, where they meet and for how long
it waits there. By the environment: TOY_TORCHRUN=1 takes the stand-in for torchrun, which starts at
once; TOY_SAVE_SECONDS is how long a save takes; TOY_LATE_RANKS name the ranks that begin late.

Worker modes: ``done``, ``user_error``, ``crash`` (of rank 1), ``lose_a_peer`` (rank 1 is killed
and rank 0 fails over it), ``train`` (until told to stop, then save), ``chained`` (``train``, but
rank 0 fails when rank 1 is gone), ``last_step`` (told to stop, it is done), ``stuck`` (never looks
at the flag), ``warn``, ``environment``;
``error_of_rank_1`` (the others wait for it); with torch, ``sum`` (adds up the ranks) and
``together`` (``train``, but all stop at one step).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from lib.console import say, warn
from lib.errors import UserError
from lib.train.signals import StopFlag
from lib.train.worker import Stopped, is_worker, worker_device, worker_session

RANK = os.environ.get("RANK", "")
SAVE_SECONDS = float(os.environ.get("TOY_SAVE_SECONDS", "0.3"))
LATE_SECONDS = 1.0


def train(folder: Path, stop: StopFlag) -> None:
    (folder / f"training.{RANK}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 200
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(SAVE_SECONDS)
    (folder / f"saved.{RANK}").write_text(str(stop.signal))
    raise Stopped("saved iteration 7")


def be_done_when_told(folder: Path, stop: StopFlag) -> None:
    (folder / f"training.{RANK}").write_text(str(os.getpid()))
    while not stop.requested:
        time.sleep(0.02)


def train_chained(folder: Path, _stop: StopFlag) -> None:
    (folder / f"training.{RANK}").write_text(str(os.getpid()))
    other = folder / "training.1"
    while RANK == "0" and not (other.exists() and other.read_text()):
        time.sleep(0.02)
    while RANK == "1" or psutil.pid_exists(int(other.read_text())):
        time.sleep(0.02)
    raise ConnectionError("connection closed by peer")


def stay_deaf(folder: Path, _stop: StopFlag) -> None:
    (folder / f"training.{RANK}").write_text(str(os.getpid()))
    time.sleep(200)


def break_a_users_rule(_folder: Path, _stop: StopFlag) -> None:
    raise UserError("data/tokens: the index is missing; run tokenize_corpus")


def crash(_folder: Path, _stop: StopFlag) -> None:
    if RANK == "1":
        sys.stderr.write("a line that libraries write\n")
        raise ZeroDivisionError("one over nothing")
    time.sleep(60)


def lose_a_peer(folder: Path, stop: StopFlag) -> None:
    listening = folder / "listening"
    if RANK == "1":
        while not listening.exists():  # or torchrun may end rank 0 before it can hear a signal
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    listening.touch()
    while not stop.requested:
        time.sleep(0.02)
    raise ConnectionError("connection closed by peer")


def speak(_folder: Path, _stop: StopFlag) -> None:
    warn("the schedule is longer than the training")
    say("hello from the worker")


def fail_on_rank_1(folder: Path, stop: StopFlag) -> None:
    if RANK == "1":
        break_a_users_rule(folder, stop)
    stay_deaf(folder, stop)


def add_up(folder: Path, _stop: StopFlag) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(RANK) + 1.0)
    dist.all_reduce(total)
    (folder / f"sum.{RANK}").write_text(str(total.item()))
    dist.destroy_process_group()


def train_together(folder: Path, stop: StopFlag) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    (folder / f"training.{RANK}").write_text(str(os.getpid()))
    while True:
        flag = torch.tensor(int(stop.requested))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            break
        time.sleep(0.02)
    (folder / f"saved.{RANK}").write_text(str(stop.signal or 0))
    dist.destroy_process_group()
    raise Stopped("saved iteration 7")


def note_environment(folder: Path, _stop: StopFlag) -> None:
    told = {"threads": os.environ["OMP_NUM_THREADS"], "device": worker_device()}
    told |= {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")}
    (folder / f"environment.{RANK}").write_text(json.dumps(told))


MODES = {
    "done": lambda _folder, _stop: None,
    "train": train,
    "chained": train_chained,
    "last_step": be_done_when_told,
    "stuck": stay_deaf,
    "user_error": break_a_users_rule,
    "crash": crash,
    "lose_a_peer": lose_a_peer,
    "warn": speak,
    "environment": note_environment,
    "error_of_rank_1": fail_on_rank_1,
    "sum": add_up,
    "together": train_together,
}


def run_launcher() -> int:
    import lib.train.launch as launcher  # not in workers: they start the sooner
    from lib.train.nodes import ONE_NODE, Nodes

    if "TOY_TORCHRUN" in os.environ:
        launcher.TORCHRUN = "toy_torchrun"
    nodes, patience = ONE_NODE, 60.0
    if sys.argv[6:]:
        host, _, port = sys.argv[8].rpartition(":")
        nodes = Nodes(int(sys.argv[6]), int(sys.argv[7]), (host, int(port)))
        patience = float(sys.argv[9])
    options = launcher.LaunchOptions(
        device="cpu",
        processes=int(sys.argv[3]),
        threads=None if sys.argv[4] == "-" else int(sys.argv[4]),
        stop_timeout_s=float(sys.argv[5]),
        log_dir=Path(sys.argv[2]) / "logs",
        nodes=nodes,
        meeting_timeout_s=patience,
    )
    return launcher.launch("toy_stage", sys.argv[1:3], options)


def main() -> None:
    if not is_worker():
        sys.exit(run_launcher())
    time.sleep(LATE_SECONDS * (RANK in os.environ.get("TOY_LATE_RANKS", "").split()))
    with worker_session() as stop:
        MODES[sys.argv[1]](Path(sys.argv[2]), stop)


if __name__ == "__main__":
    main()
