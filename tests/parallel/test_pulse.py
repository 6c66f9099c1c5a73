"""A rank that stands still where no call of ours shows it is named, with what it last did."""

import os
import signal
import subprocess
import time

import torch
import torch.distributed as dist

from lib.parallel.collectives import all_reduce
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.monitor import watch_groups
from tests.distributed import run_on_ranks

_SLOW_S, _STILL_S = 1.0, 4.0


def watched(reports):
    plain = groups_of(build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size()))
    is_first = dist.get_rank() == 0
    ours = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    )
    port = [ours.port if ours else None]
    dist.broadcast_object_list(port)
    store = ours or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    return watch_groups(plain, store, report=reports.append, slow_s=_SLOW_S)


def still_on_rank(stand_still):
    """Rank 1 stands still while the others wait for it inside torch, in nothing that is watched."""
    reports = []
    groups = watched(reports)
    all_reduce(torch.ones(5), groups.world)
    if dist.get_rank() == 1:
        stand_still()
    dist.barrier()
    found = list(reports)
    all_reduce(torch.ones(5), groups.world)
    return found


def be_stopped():
    subprocess.Popen(["sh", "-c", f"sleep {_STILL_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(_STILL_S)


def test_a_stopped_process_is_named_with_its_last_call():
    first, *others = run_on_ranks(3, still_on_rank, be_stopped)
    named = [text for text in first if text.startswith("rank 1 has not answered for ")]
    assert named, first
    assert "its last call: call 0 of world" in named[0]
    assert "float32 [5], at tests/parallel/test_pulse.py:" in named[0]
    assert others[1] == []  # one speaks for all


def test_a_sleeping_rank_is_seen_by_where_each_rank_is():
    first, *others = run_on_ranks(2, still_on_rank, sleep)
    told = [text for text in first if text.startswith("no rank has made a call for ")]
    assert told, first
    places = dict(each.split(" at ") for each in told[0].partition(": ")[2].split("; "))
    assert places["rank 0"].startswith("tests/parallel/test_pulse.py:")
    assert places["rank 1"].startswith("tests/parallel/test_pulse.py:")
    assert places["rank 0"] != places["rank 1"]
    assert others == [[]]
