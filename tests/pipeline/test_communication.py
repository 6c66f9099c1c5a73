"""Transfers between stages: the right tensor arrives, in time, and nobody waits for ever.

Most of it runs as threads over wires on which a send ends only when its receive is posted, as
NCCL and gloo may have it: what passes here needs no buffering of theirs.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import pytest
import torch
import torch.distributed as dist

from lib.parallel.groups import Channel, Channels
from lib.parallel.mesh import build_mesh, groups_of
from lib.pipeline.communication import Links, Traffic
from lib.pipeline.executor import run_plan
from lib.pipeline.plan import stage_plan
from lib.pipeline.schedule import Action, Kind
from tests.distributed import run_on_ranks

SHAPE = (2, 1, 3)
PATIENCE_S = 20.0


class Wire:
    """A channel between two threads; one send at a time is open on it."""

    def __init__(self):
        self.changed = Condition()
        self.sent, self.sends_waited, self.received = [], 0, []

    def send(self, tensor):
        with self.changed:
            assert len(self.sent) == self.sends_waited
            self.sent.append(tensor)
            self.changed.notify_all()
        return Work(self, len(self.sent) - 1, is_send=True)

    def receive(self, tensor):
        with self.changed:
            self.received.append(tensor)
            self.changed.notify_all()
        return Work(self, len(self.received) - 1, is_send=False)


class Work:
    def __init__(self, wire, number, is_send):
        self.wire, self.number, self.is_send = wire, number, is_send

    def wait(self):
        wire = self.wire
        theirs = wire.received if self.is_send else wire.sent
        with wire.changed:
            assert wire.changed.wait_for(lambda: len(theirs) > self.number, PATIENCE_S), "stuck"
            if self.is_send:
                wire.sends_waited += 1
            else:
                wire.received[self.number].copy_(wire.sent[self.number])


@pytest.fixture
def wires(monkeypatch):
    """Makes torch's point-to-point calls use wires given as process groups."""
    monkeypatch.setattr(dist, "isend", lambda tensor, dst, group: group.send(tensor))
    monkeypatch.setattr(dist, "irecv", lambda tensor, src, group: group.receive(tensor))


def ring(stages, chunks, watches=None):
    """The links of every stage, over wires."""
    # Number s connects stage s and the one after it.
    activations = [Wire() for _ in range(stages)]
    gradients = [Wire() for _ in range(stages)]
    links = []
    for stage in range(stages):
        watch = None if watches is None else watches[stage]
        before, after = (stage - 1) % stages, (stage + 1) % stages
        channels = Channels(
            activations_in=Channel(before, activations[before], "from before", watch),
            activations_out=Channel(after, activations[stage], "to after", watch),
            gradients_in=Channel(after, gradients[stage], "from after", watch),
            gradients_out=Channel(before, gradients[before], "to before", watch),
        )
        links.append(Links(channels, stage, stages, chunks, SHAPE, torch.float64))
    return links


def tag(number, micro_batch):
    return torch.full(SHAPE, number * 1000.0 + micro_batch, dtype=torch.float64)


class Tagged(torch.autograd.Function):
    """A chunk: checks that what comes in is its neighbours' tag, both ways; gives its own."""

    @staticmethod
    def forward(ctx, weight, received, number, micro_batch):
        ctx.place = number, micro_batch, received is not None
        if received is not None:
            assert torch.equal(received, tag(number - 1, micro_batch))
        return tag(number, micro_batch)

    @staticmethod
    def backward(ctx, *grads):
        number, micro_batch, has_input = ctx.place
        if not torch.equal(grads[0], torch.ones_like(grads[0])):  # the last chunk's loss is a sum
            assert torch.equal(grads[0], tag(number + 1, micro_batch))
        gradient = tag(number, micro_batch) if has_input else None
        return torch.zeros(()), gradient, None, None


def run_tagged(links, plan, log=None):
    """Runs a plan of tagged chunks; gives the losses as plain numbers."""
    weight = torch.zeros((), requires_grad=True)

    def forward(chunk, micro_batch, received):
        if log is not None:
            log.append(f"F{micro_batch}")
        output = Tagged.apply(weight, received, links.global_chunk(chunk), micro_batch)
        return output.sum() if links.is_last(chunk) else output

    def before_backward(chunk, is_last):
        if log is not None:
            log.append("B")

    losses = run_plan(plan, forward, links, before_backward=before_backward)
    return [loss.item() for loss in losses]


def in_threads(work, stages):
    with ThreadPoolExecutor(stages) as pool:
        return list(pool.map(work, range(stages)))


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_transfer_reaches_its_action_without_any_buffering(wires, stages, chunks):
    # The last one ends in an incomplete group, whose messages lie about longest.
    for count in (1, stages - 1, stages, stages + 1, 2 * stages, 3 * stages + 1):
        links = ring(stages, chunks)

        def work(stage, count=count, links=links):
            step = stage_plan(stage, stages, chunks, count, trains=True)
            validation = stage_plan(stage, stages, chunks, count + 1, trains=False)
            return [run_tagged(links[stage], plan) for plan in (step, validation, step)]

        *others, last = in_threads(work, stages)
        assert others == [[[], [], []]] * (stages - 1)
        number = stages * chunks - 1
        losses = [tag(number, micro_batch).sum().item() for micro_batch in range(count + 1)]
        assert last == [losses[:-1], losses, losses[:-1]]


def test_receives_are_posted_when_the_plan_says_and_named_alike_on_both_ends(wires):
    logs = [[], []]
    watches = [lambda call, tensor, log=log: log.append(call) for log in logs]
    links = ring(2, 1, watches)
    plans = [stage_plan(stage, 2, 1, 3, trains=True) for stage in range(2)]
    in_threads(lambda stage: run_tagged(links[stage], plans[stage], logs[stage]), 2)

    def there(number):
        return f"micro batch {number}, chunk 0 to 1"

    def back(number):
        return f"micro batch {number}, chunk 1 to 0"

    # By hand, a forward taking 1 and a backward 2. Stage 0 runs F0 F1 B0 F2 B1 B2 from 0, 1, 4, 6,
    # 7, 10 on and needs each gradient when it is made. Stage 1 runs F0 B0 F1 B1 F2 B2 from 1, 2, 4,
    # 5, 7, 8 on: micro batch 1 is there at 2, while 0 is on its way back.
    first = ["F0", there(0), "F1", there(1), "B", back(0), "F2", there(2)]
    assert logs[0] == [*first, "B", back(1), "B", back(2)]
    first = [there(0), "F0", "B", there(1), back(0), "F1", "B", back(1)]
    assert logs[1] == [*first, there(2), "F2", "B", back(2)]


def test_hidden_states_of_another_shape_or_dtype_are_not_sent(wires):
    plan = [Action(Kind.FORWARD, 0)]
    traffic = Traffic(ring(2, 1)[0])
    with pytest.raises(AssertionError):
        traffic.send(plan[0], torch.zeros(2, 1, 2, dtype=torch.float64))
    with pytest.raises(AssertionError):
        traffic.send(plan[0], torch.zeros(SHAPE, dtype=torch.float32))


def test_what_is_sent_is_contiguous(wires):
    links = ring(2, 1)
    plan = [Action(Kind.FORWARD, 0)]
    values = torch.arange(6.0, dtype=torch.float64)
    Traffic(links[0]).send(plan[0], values.reshape(3, 1, 2).transpose(0, 2))
    sent = links[0].channels.activations_out.process_group.sent[0]
    assert sent.is_contiguous()
    assert torch.equal(sent.flatten(), torch.tensor([0, 2, 4, 1, 3, 5], dtype=torch.float64))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_connect_uses_every_channel_that_will_be_used_and_does_not_hang(wires, stages, chunks):
    links = ring(stages, chunks)
    in_threads(lambda stage: links[stage].connect(), stages)
    for stage in range(stages):
        used = chunks > 1 or stage < stages - 1
        for channel in (links[stage].channels.activations_out, links[stage].channels.gradients_in):
            wire = channel.process_group
            assert (len(wire.sent), len(wire.received)) == (used, used)


def test_a_lone_stage_has_nothing_to_connect():
    links = Links()
    links.connect()
    assert (links.is_first(0), links.is_last(0)) == (True, True)


def test_chunks_are_dealt_round_robin():
    links = ring(3, 2)
    places = [[one.global_chunk(chunk) for chunk in range(2)] for one in links]
    assert places == [[0, 3], [1, 4], [2, 5]]
    assert [one.is_first(0) for one in links] == [True, False, False]
    assert [one.is_last(1) for one in links] == [False, False, True]
    assert not any(one.is_first(1) or one.is_last(0) for one in links)


def tagged_on_rank(stages, cases):
    groups = groups_of(build_mesh("cpu", tensor=1, pipeline=stages, data=1))
    results = []
    for chunks, count in cases:
        links = Links(groups.channels, groups.pp.rank, stages, chunks, SHAPE, torch.float64)
        links.connect()
        plan = stage_plan(links.stage, stages, chunks, count, trains=True)
        results.append(run_tagged(links, plan))
    return results


@pytest.mark.parametrize("stages", [2, 3])
def test_over_gloo(stages):
    cases = [(1, 5), (2, stages), (2, 2 * stages + 1)]
    *others, last = run_on_ranks(stages, tagged_on_rank, stages, cases)
    assert others == [[[]] * len(cases)] * (stages - 1)
    for losses, (chunks, count) in zip(last, cases, strict=True):
        number = stages * chunks - 1
        assert losses == [tag(number, micro_batch).sum().item() for micro_batch in range(count)]
