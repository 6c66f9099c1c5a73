"""Ranks: what they send is compared, timed and judged; what hangs or fails is explained."""

import time

import pytest
import torch
import torch.distributed as dist

from lib.hardware import links, traffic
from lib.hardware.facts import Facts
from lib.hardware.findings import failed_by
from lib.hardware.links import Link, check_gloo, check_nccl, find_link, judge_traffic
from lib.hardware.nvml import GpuState
from lib.hardware.traffic import Traffic, measure_traffic
from lib.parallel.groups import Group
from tests.distributed import run_on_ranks

CPU = torch.device("cpu")
MIB = 2**20


def test_two_ranks_send_each_other_what_they_should():
    found, other = run_on_ranks(2, measure_traffic, "cpu", (MIB // 4, MIB), 1)
    assert found == other, "figures are those of the slowest rank"
    assert (found.ranks, found.library, found.wrong) == (2, "gloo", ())
    assert found.latency_us > 0
    calls = ("all-reduce", "all-gather", "reduce-scatter")
    assert set(found.bus_gb_per_s) == {(c, s) for c in calls for s in (MIB // 4, MIB)}
    assert set(found.pairs_gb_per_s) == {(0, 1)}


def spoil(name):
    """What the ranks see when a call changes one number on rank 1."""
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    true = getattr(traffic, name)

    def spoilt(*arguments):
        found = true(*arguments)
        target = arguments[1] if name == "_exchange" else found
        if group.rank == 1:
            target[-1] += 1
        return found

    setattr(traffic, name, spoilt)
    try:
        return traffic._wrong_calls(group, CPU)
    finally:
        setattr(traffic, name, true)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", "all reduce"),
        ("gather_first_dim", "all gather"),
        ("reduce_scatter_first_dim", "reduce scatter"),
        ("_exchange", "exchange of pairs"),
    ],
)
def test_a_call_that_changes_a_number_is_found(name, call):
    assert run_on_ranks(2, spoil, name) == [(f"{call} on rank 1",)] * 2


def one_sleeps():
    if dist.get_rank() == 1:
        time.sleep(60.0)
    dist.barrier()


def test_a_rank_that_sleeps_is_told_after_the_time_limit():
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(2, one_sleeps, timeout=1.0)
    finding = failed_by("gloo", caught.value)
    assert finding.status == "failed"
    assert "did not finish within 1 s" in finding.seen
    assert "waits for another" in finding.meaning
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_the_check_has_a_time_limit():
    (finding,) = check_gloo(Facts(cores=2, time_limit_s=0.001))
    assert (finding.name, finding.status) == ("gloo, 2 ranks", "failed")
    assert "did not finish within 0.001 s" in finding.seen


def test_fewer_gpus_than_told_is_explained(monkeypatch):
    def refuse(*_arguments, **_options):
        raise AssertionError(
            "rank 1 of 2 raised\nAcceleratorError: CUDA error: invalid device ordinal"
        )

    monkeypatch.setattr(links, "run_on_ranks", refuse)
    (finding,) = check_nccl(Facts(gpus=("GPU", "GPU")))
    assert (finding.status, finding.device) == ("failed", "cuda")
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy
    assert [f.status for f in check_nccl(Facts())] == ["not applicable"]


def told(**changes):
    values = {
        "ranks": 2,
        "library": "NCCL 2.28",
        "wrong": (),
        "latency_us": 30.0,
        "bus_gb_per_s": {("all-reduce", 64 * MIB): 50.0, ("all-reduce", 256 * MIB): 350.0},
        "pairs_gb_per_s": {(0, 1): 300.0},
    }
    return Traffic(**(values | changes))


def statuses(found, link=None):
    findings = judge_traffic("NCCL", found, link or Link("NVLink", 450.0), "cuda")
    return {finding.name: finding.status for finding in findings}


def test_a_good_link_is_good_and_small_tensors_are_not_judged():
    assert set(statuses(told()).values()) == {"ok"}
    findings = list(judge_traffic("NCCL", told(), Link("NVLink", 450.0), "cuda"))
    rates = [f.figures["link_gb_per_s"] for f in findings if "link_gb_per_s" in f.figures]
    assert rates == [350.0], "the ceiling is that of the largest all-reduce"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"latency_us": 900.0}, "NCCL: latency"),
        ({"bus_gb_per_s": {("all-reduce", 256 * MIB): 40.0}}, "NCCL: all-reduce, 256 MiB"),
        ({"pairs_gb_per_s": {(0, 1): 40.0}}, "NCCL: ranks 0 and 1, 256 MiB"),
    ],
)
def test_what_is_slow_is_named(changes, name):
    found = statuses(told(**changes))
    assert [key for key, status in found.items() if status != "ok"] == [name]
    assert found[name] == "slow"


def test_pcie_is_held_against_pcie():
    slow = told(bus_gb_per_s={("all-reduce", 256 * MIB): 20.0}, pairs_gb_per_s={(0, 1): 20.0})
    assert set(statuses(slow, Link("PCIe", 63.0)).values()) == {"ok"}
    assert set(statuses(slow, Link("PCIe")).values()) == {"ok"}, "a link that is not told"


def test_wrong_numbers_fail():
    found = statuses(told(wrong=("all reduce on rank 1",)))
    assert found["NCCL"] == "failed"


def test_one_rank_has_no_link():
    alone = told(ranks=1, bus_gb_per_s={}, pairs_gb_per_s={})
    assert statuses(alone) == {"NCCL": "ok"}


class FakeNvml:
    def __init__(self, states, *, linked):
        self.linked, self.states = linked, states

    def are_linked(self, _one, _other):
        return self.linked

    def state(self, index):
        return self.states[index]


def test_the_slowest_link_counts():
    switched = [
        GpuState(links=up, link_gb_per_s=26.5, switched=True, pcie_gb_per_s=63.0) for up in (18, 16)
    ]
    assert find_link(2, FakeNvml(switched, linked=True)) == Link("NVLink", 16 * 26.5)
    assert find_link(2, FakeNvml(switched, linked=False)) == Link("PCIe", 63.0)
    assert find_link(2, FakeNvml([GpuState(), GpuState()], linked=False)) == Link("PCIe", None)
