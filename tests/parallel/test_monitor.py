"""The monitor of collectives: faults raised on every rank, late ranks named, nothing left behind.

Most tests call ``watch`` alone, as the collectives do, and leave out the transfer that would hang.
"""

import itertools
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lib.parallel.collectives import (
    all_reduce,
    gather_first_dim,
    reduce_scatter_first_dim,
    reduce_scatter_to_sequence,
)
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.monitor import CollectiveFault, watch_groups
from tests.distributed import run_on_ranks

_HERE = r"test_monitor\.py:\d+"
_SOON_S = 10.0  # what the monitor promises


class Watched:
    """This rank's groups, watched with a store of their own, and what was reported."""

    def __init__(self, *, tensor=1, pipeline=1, **limits):
        data = dist.get_world_size() // tensor // pipeline
        self.plain = groups_of(build_mesh("cpu", tensor=tensor, pipeline=pipeline, data=data))
        self.rank = dist.get_rank()
        port = [None]
        if self.rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = [self.store.port]
        dist.broadcast_object_list(port)
        if self.rank > 0:
            self.store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
        self.reports, self.times = [], []
        for rank in range(dist.get_world_size()):
            self.store.add(f"told/{rank}", 0)
        self.groups = watch_groups(
            self.plain, dist.PrefixStore("debug", self.store), report=self.report, **limits
        )
        dist.barrier()
        self.started = time.monotonic()

    def report(self, text):
        if re.match(r"rank \d+ has not answered|no rank has made", text):
            return  # by the pulse, which has tests of its own
        self.reports.append(text)
        self.times.append(time.monotonic() - self.started)
        if named := re.match(r"rank (\d+) has not come", text):
            self.store.add(f"told/{named[1]}", 1)

    def come_late(self):
        """Returns once others have reported this rank to be late, twice."""
        until(lambda: self.store.add(f"told/{self.rank}", 0) >= 2)

    def fault_of(self, watch, call, tensor):
        """The text of the fault that a call meets, or None, and after how many seconds."""
        text = None
        try:
            watch(call, tensor)
        except CollectiveFault as fault:
            text = str(fault)
        return text, time.monotonic() - self.started

    def keys(self):
        """Number of keys in the store, with all ranks at this point."""
        dist.barrier()
        count = self.store.num_keys()
        dist.barrier()
        return count

    def looks(self):
        """Whether a thread looks for the other ends of this rank's transfers."""
        return any(thread.name == "transfers" for thread in threading.enumerate())

    def done(self, *result):
        """The test's result, once no rank needs the store any more."""
        dist.barrier()
        return *result, self.reports, self.times


def until(condition):
    deadline = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def collectives_of(groups):
    """Results and gradients of collectives over every group of a rank."""
    x = torch.arange(8.0).view(4, 2) + dist.get_rank()
    x.requires_grad_()
    found = [all_reduce(x.detach() * 2, group) for group in (groups.dp, groups.world)]
    found += [
        gather_first_dim(x.detach(), groups.tp),
        reduce_scatter_first_dim(x.detach(), groups.tp),
    ]
    y = reduce_scatter_to_sequence(x * 1.0, groups.tp)
    (y * torch.arange(4.0).view(2, 2)).sum().backward()
    return [*found, y.detach(), x.grad]


def all_well_on_rank():
    watched = Watched(tensor=2)
    truth = collectives_of(watched.plain)
    keys = []
    for _ in range(10):
        found = collectives_of(watched.groups)
        assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))
        keys.append(watched.keys())
    return watched.done(keys)


def test_all_well_gives_the_same_results_and_a_store_that_does_not_grow():
    for keys, reports, _ in run_on_ranks(4, all_well_on_rank):
        assert set(keys) == {keys[0]}
        # Of each rank the last call of tp, dp, world, the last of any, its pulse, the test's own.
        assert keys[0] == 4 * 6
        assert reports == []


def transfers_on_rank(count):
    """Both stages of two send to each other on two channels, receives posted ahead."""
    watched = Watched(pipeline=2)
    ends = watched.groups.channels
    before, found, works = watched.keys(), [], []
    for direction in ("activations", "gradients"):
        for number in range(count):
            buffer = torch.empty(3)
            channel = getattr(ends, f"{direction}_in")
            channel.watch(f"micro batch {number}", buffer)
            works.append(dist.irecv(buffer, channel.peer, group=channel.process_group))
            found.append(buffer)
    for direction, number in itertools.product(("activations", "gradients"), range(count)):
        tensor = torch.full((3,), float(number + 100 * watched.rank))
        channel = getattr(ends, f"{direction}_out")
        channel.watch(f"micro batch {number}", tensor)
        dist.isend(tensor, channel.peer, group=channel.process_group).wait()
    for work in works:
        work.wait()
    until(lambda: not watched.looks())  # its thread ends once all transfers are matched
    return watched.done([int(x[0]) for x in found], before, watched.keys())


@pytest.mark.parametrize("count", [1, 7])
def test_transfers_pass_and_leave_only_each_ranks_last_call(count):
    ranks = run_on_ranks(2, transfers_on_rank, count)
    for rank, (found, before, after, reports, _) in enumerate(ranks):
        assert found == [number + 100 * (1 - rank) for number in range(count)] * 2
        assert after == before + 2
        assert reports == []


_USUAL = ("all_reduce", "float32", [2, 3])
_ODD = [("all_reduce", "float32", [3]), ("all_reduce", "float64", [2, 3]), ("gather", "int64", [1])]


def differ_on_rank(odd, odd_call):
    watched = Watched()
    all_reduce(torch.ones(2, 3), watched.groups.dp)
    call, dtype, shape = odd_call if watched.rank == odd else _USUAL
    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    return watched.done(*watched.fault_of(watched.groups.dp.watch, call, tensor))


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("odd_call", _ODD, ids=["shape", "dtype", "all"])
def test_a_rank_that_differs_is_named_on_all_ranks(odd, odd_call):
    rest = ", ".join(str(rank) for rank in range(4) if rank != odd)
    for text, seconds, *_ in run_on_ranks(4, differ_on_rank, odd, odd_call):
        assert text.startswith("ranks differ in call 1 of dp (ranks 0, 1, 2, 3): ")
        for who, (call, dtype, shape) in ((f"ranks {rest}", _USUAL), (f"rank {odd}", odd_call)):
            named = re.escape(f"{who}: {call}, {dtype} {shape}, at ")
            assert re.search(rf"{named}\S*{_HERE}", text)
        assert seconds < _SOON_S


def real_call_on_rank():
    """The collective itself would crash on gloo or hang on NCCL: it is not reached."""
    watched = Watched()
    tensor = torch.ones(5 if watched.rank else 4)
    with pytest.raises(CollectiveFault, match=rf"rank 1: all_reduce, float32 \[5\], at \S*{_HERE}"):
        all_reduce(tensor, watched.groups.world)
    return watched.done(tensor.tolist())


def test_the_fault_comes_before_the_collective():
    ranks = run_on_ranks(2, real_call_on_rank)
    assert [values for values, *_ in ranks] == [[1.0] * 4, [1.0] * 5]


def late_on_rank():
    watched = Watched(slow_s=0.4)
    all_reduce(torch.ones(2), watched.groups.world)
    before = watched.keys()
    if watched.rank == 2:
        watched.come_late()
    total = all_reduce(torch.ones(3, dtype=torch.int64), watched.groups.world)
    assert watched.keys() == before
    return watched.done(total.tolist())


def test_a_late_rank_is_named_again_and_again_by_one_rank():
    ranks = run_on_ranks(4, late_on_rank)
    assert [total for total, *_ in ranks] == [[4] * 3] * 4  # slow is no fault
    (reports,) = [reports for _, reports, _ in ranks if reports]
    text = reports[-1]  # the earlier ones may name a rank that was slow by chance as well
    assert re.match(r"rank 2 has not come to call 1 of world \(ranks 0, 1, 2, 3\)", text)
    assert re.search(rf"\(all_reduce, int64 \[3\], at \S*{_HERE}\), where rank [013]", text)
    last = r"last call of rank 2: call 0 of world .*\(all_reduce, float32 \[2\], at"
    assert re.search(last, text)


def late_with_the_defaults_on_rank():
    """Rank 3 sleeps: 2 waits for it in a collective, 1 for what it is to send; 0 has no part."""
    watched = Watched(tensor=2, pipeline=2)
    ends = watched.groups.channels
    if watched.rank == 3:
        time.sleep(12)
        ends.gradients_out.watch("micro batch 5", torch.ones(4))
        dist.isend(torch.ones(4), ends.gradients_out.peer, group=ends.gradients_out.process_group)
    if watched.rank == 1:
        buffer = torch.empty(4)
        ends.gradients_in.watch("micro batch 5", buffer)
        work = dist.irecv(buffer, ends.gradients_in.peer, group=ends.gradients_in.process_group)
        work.wait()
    total = all_reduce(torch.ones(1), watched.groups.tp).item() if watched.rank >= 2 else 2.0
    return watched.done(total)


def test_a_rank_that_sleeps_12_seconds_is_named_within_10():
    ranks = run_on_ranks(4, late_with_the_defaults_on_rank)
    assert [total for total, *_ in ranks] == [2.0] * 4
    assert ranks[0][1] == ranks[3][1] == []
    (transfer,), (collective,) = ranks[1][1], ranks[2][1]
    assert re.match(
        r"rank 3 has not come to call 0 of gradients 3 -> 1 \(micro batch 5, ", transfer
    )
    assert re.match(
        r"rank 3 has not come to call 0 of tp \(ranks 2, 3\) \(all_reduce, ", collective
    )
    assert all("last call of rank 3: none" in text for text in (transfer, collective))
    assert ranks[1][2][0] < _SOON_S
    assert ranks[2][2][0] < _SOON_S


def never_on_rank():
    watched = Watched(slow_s=1.0, give_up_s=3.0)
    if watched.rank == 1:
        return watched.done(None)
    return watched.done(
        watched.fault_of(watched.groups.world.watch, "all_reduce", torch.ones(1))[0]
    )


def test_a_rank_that_never_comes_is_given_up():
    ranks = run_on_ranks(3, never_on_rank)
    for rank in (0, 2):
        assert re.match(r"gave up: rank 1 has not come to call 0 of world", ranks[rank][0])
    assert ranks[1][0] is None


def crossed_on_rank():
    """Two groups of the same ranks, called in another order on each: a deadlock."""
    watched = Watched(tensor=2, slow_s=1.0, give_up_s=3.0)
    group = watched.groups.tp if watched.rank == 0 else watched.groups.world
    return watched.done(watched.fault_of(group.watch, "all_reduce", torch.ones(1))[0])


def test_crossed_calls_show_where_the_other_one_is():
    first, second = (text for text, *_ in run_on_ranks(2, crossed_on_rank))
    assert re.search(
        r"rank 1 has not come to call 0 of tp .*; last call of rank 1: call 0 of world", first
    )
    assert re.search(
        r"rank 0 has not come to call 0 of world .*; last call of rank 0: call 0 of tp", second
    )


def not_finite_on_rank(bad_ranks):
    watched = Watched()
    for value in (float("inf"), float("nan"), -float("inf")):
        tensor = torch.tensor([1.0, value if watched.rank in bad_ranks else 2.0])
        watched.groups.world.watch("all_reduce", tensor)
    watched.groups.world.watch("all_reduce", torch.ones(2, dtype=torch.int64))
    once = list(watched.reports)
    value = float("inf") if watched.rank == 2 else 0.0
    watched.groups.world.watch("all_reduce", torch.tensor([value]))  # another place
    return watched.done(once)


@pytest.mark.parametrize(("bad_ranks", "named"), [((1,), "rank 1"), ((1, 2), "ranks 1, 2")])
def test_values_that_are_not_finite_are_told_once_a_place(bad_ranks, named):
    ranks = run_on_ranks(3, not_finite_on_rank, bad_ranks)
    text = rf"not finite on {named}: call 0 of world \(ranks 0, 1, 2\) \(all_reduce, .*{_HERE}\)"
    assert [len(once) for once, *_ in ranks] == [0, 1, 0]
    assert re.match(text, ranks[1][0][0])
    assert [len(reports) for _, reports, _ in ranks] == [0, 1, 1]
    assert ranks[2][1][0].startswith("not finite on rank 2: call 4 of world")


def mismatched_transfer_on_rank(first):
    """Stage 0 sends 4 numbers, stage 1 expects 5; ``first`` is there first and goes on."""
    watched = Watched(pipeline=2)
    ends = watched.groups.channels
    end, size = (ends.activations_out, 4) if watched.rank == 0 else (ends.activations_in, 5)
    if watched.rank != first:
        dist.barrier()
    found = [watched.fault_of(end.watch, "micro batch 0", torch.ones(size))]
    if watched.rank == first:
        dist.barrier()
        until(lambda: watched.reports)
        found.append(watched.fault_of(ends.gradients_in.watch, "micro batch 0", torch.ones(1)))
    return watched.done(found)


@pytest.mark.parametrize("first", [0, 1])
def test_a_transfer_whose_ends_differ_is_a_fault_at_both(first):
    ranks = run_on_ranks(2, mismatched_transfer_on_rank, first)
    text = (
        rf"ranks differ in call 0 of activations 0 -> 1: rank 0: micro batch 0, float32 \[4\], "
        rf"at \S*{_HERE}; rank 1: micro batch 0, float32 \[5\], at \S*{_HERE}"
    )
    (early, later), reports, times = ranks[first]
    assert early[0] is None
    assert re.match(text, reports[0])
    assert times[0] < _SOON_S
    assert re.match(text, later[0])
    ((fault, seconds),), *_ = ranks[1 - first]
    assert re.match(text, fault)
    assert seconds < _SOON_S


def late_transfer_on_rank(late):
    watched = Watched(pipeline=2, slow_s=0.3, give_up_s=30.0)
    ends = watched.groups.channels
    end = ends.activations_out if watched.rank == 0 else ends.activations_in
    if watched.rank == late:
        watched.come_late()
    value = float("nan")  # in a buffer to be received it means nothing
    end.watch("micro batch 3", torch.full((2,), 1.0 if watched.rank == 0 else value))
    return watched.done()


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_end_of_a_transfer_is_named(late):
    ranks = run_on_ranks(2, late_transfer_on_rank, late)
    assert ranks[late][0] == []
    assert len(ranks[1 - late][0]) >= 2
    for text in ranks[1 - late][0]:
        assert text.startswith(f"rank {late} has not come to call 0 of activations 0 -> 1")


def sent_overflow_on_rank():
    watched = Watched(pipeline=2)
    ends = watched.groups.channels
    end = ends.activations_out if watched.rank == 0 else ends.activations_in
    for number in range(3):
        end.watch(f"micro batch {number}", torch.full((2,), float("inf")))
    return watched.done()


def test_what_is_sent_is_looked_at_and_told_once_for_all_micro_batches():
    (told, _), (received, _) = run_on_ranks(2, sent_overflow_on_rank)
    assert len(told) == 1
    assert told[0].startswith("not finite on rank 0: call 0 of activations 0 -> 1 (micro batch 0")
    assert received == []


def never_sent_on_rank():
    watched = Watched(pipeline=2, slow_s=0.2, give_up_s=0.6)
    if watched.rank == 0:
        return watched.done(None)
    watched.groups.channels.activations_in.watch("micro batch 0", torch.ones(1))
    until(lambda: not watched.looks())
    group = watched.groups.pp
    return watched.done(watched.fault_of(group.watch, "all_reduce", torch.ones(1))[0])


def test_a_transfer_that_never_comes_is_given_up():
    _, (text, reports, _) = run_on_ranks(2, never_sent_on_rank)
    assert re.match(r"gave up: rank 0 has not come to call 0 of activations 0 -> 1", text)
    assert reports[-1] == text


def alone_on_rank():
    return (watched := Watched()).groups == watched.plain


def test_a_group_of_one_is_left_alone():
    assert run_on_ranks(1, alone_on_rank) == [True]
