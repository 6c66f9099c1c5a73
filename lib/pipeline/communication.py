"""Transfers between pipeline stages: hidden states go forward, their gradients back.

A pipeline of P stages with V chunks each is a chain of P * V global chunks g = chunk * P + stage,
so neighbours in the chain are neighbours on a ring of stages. A forward of chunk g receives the
hidden states [S, B, H] of g - 1 and sends its own to g + 1; a backward of g receives their
gradient from g + 1 and sends that of its input to g - 1.

Each direction between two stages is a ``Channel`` with a communicator of its own. Its transfers
are matched in order, first sent, first received, and wait for no other direction. For that reason
``dist.batch_isend_irecv`` is not needed: it groups sends and receives that share a communicator,
whose one queue would otherwise order them, and let two stages that send to each other wait for
ever.

Both ends are asynchronous. When a receive is posted says the plan (``lib.pipeline.plan``): once its
message is made, so before it is needed where the message comes early. A send is left alone until
the next one on its channel, which waits for it first, so a channel holds the memory of at most one
sent tensor. With gloo these waits block. With NCCL they only order streams and the host runs on;
as it is ahead of the device, receives begin while earlier work still runs, on a stream of their
own that does not wait for it.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel.groups import Channel, Channels
from lib.pipeline.schedule import Action, Kind


@dataclass(frozen=True)
class Links:
    """A stage's place in the pipeline and its connections; the default is a lone stage.

    Attributes:
        channels: to the neighbours; None where the pipeline has one stage (and one chunk).
        stage: this stage, ``0 <= stage < stages``.
        stages: number of stages P.
        chunks: number of chunks V of each stage.
        shape: of the hidden states between chunks: [S, B, H], or [S/T, B, H] under sequence
            parallelism over T ranks.
        dtype: of the hidden states and their gradients.
        device: of both.
        stream: for receives on a GPU; None posts them on the current stream.
    """

    channels: Channels | None = None
    stage: int = 0
    stages: int = 1
    chunks: int = 1
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    stream: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.stage < self.stages
        assert (self.channels is None) == (self.stages * self.chunks == 1)

    def global_chunk(self, chunk: int) -> int:
        """Place of one of this stage's chunks in the chain of all."""
        return chunk * self.stages + self.stage

    def is_first(self, chunk: int) -> bool:
        """Whether this chunk of the stage starts the chain: it holds the embedding."""
        return self.global_chunk(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Whether this chunk of the stage ends the chain: it holds the head and the loss."""
        return self.global_chunk(chunk) == self.stages * self.chunks - 1

    def connect(self) -> None:
        """Moves one element over every channel; all stages call this once, before any plan.

        NCCL makes a communicator when it is first used, and both hosts wait for each other there:
        amid a plan two stages could wait in a circle. Here all take the steps of the ring in one
        order, even ones first, so that few have to wait for others.
        """
        if self.channels is None:
            return
        # torch warns of transfers that share a group one after another: here none do.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        ends = self.channels
        before = (self.stage - 1) % self.stages
        steps = {
            self.stage: ((ends.activations_out, True), (ends.gradients_in, False)),
            before: ((ends.activations_in, False), (ends.gradients_out, True)),
        }
        if self.chunks == 1:
            steps.pop(self.stages - 1, None)  # from the last stage to the first: nothing goes there
        element = torch.zeros(1, dtype=self.dtype, device=self.device)
        for step in sorted(steps, key=lambda number: (number % 2, number)):
            for channel, sends in steps[step]:
                start = _start_send if sends else _start_receive
                start(channel, element, "connect").wait()


def _start_send(channel: Channel, tensor: Tensor, call: str) -> dist.Work:
    if channel.watch is not None:
        channel.watch(call, tensor)
    work = dist.isend(tensor, dst=channel.peer, group=channel.process_group)
    assert work is not None
    return work


def _start_receive(channel: Channel, tensor: Tensor, call: str) -> dist.Work:
    if channel.watch is not None:
        channel.watch(call, tensor)
    work = dist.irecv(tensor, src=channel.peer, group=channel.process_group)
    assert work is not None
    return work


@dataclass(frozen=True)
class _Transfer:
    """A tensor's way over a channel; ``call`` names it, on both ends alike."""

    channel: Channel
    call: str


def _incoming(links: Links, action: Action) -> _Transfer | None:
    """What an action needs from another stage."""
    here, ends = links.global_chunk(action.chunk), links.channels
    if action.kind is Kind.FORWARD:
        if ends is None or links.is_first(action.chunk):
            return None
        return _Transfer(ends.activations_in, _call(action, here - 1, here))
    if ends is None or links.is_last(action.chunk):
        return None
    return _Transfer(ends.gradients_in, _call(action, here + 1, here))


def _outgoing(links: Links, action: Action) -> _Transfer | None:
    """What an action gives to another stage."""
    here, ends = links.global_chunk(action.chunk), links.channels
    if action.kind is Kind.FORWARD:
        if ends is None or links.is_last(action.chunk):
            return None
        return _Transfer(ends.activations_out, _call(action, here, here + 1))
    if ends is None or links.is_first(action.chunk):
        return None
    return _Transfer(ends.gradients_out, _call(action, here, here - 1))


def _call(action: Action, sender: int, receiver: int) -> str:
    return f"micro batch {action.micro_batch}, chunk {sender} to {receiver}"


class Traffic:
    """The transfers of one run of a plan.

    Args:
        links: the stage's connections.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        # Tensors are kept with the works that fill or read them.
        self._receiving: dict[tuple[Kind, int, int], tuple[Tensor, dist.Work]] = {}
        self._sending: dict[Channel, tuple[Tensor, dist.Work]] = {}

    def receive(self, action: Action) -> Tensor | None:
        """Posts the receives that are due and waits for what the action needs.

        Returns:
            A tensor of the links' shape; None where the action needs nothing. An input that no
            earlier action posted is posted now.
        """
        for kind, micro_batch, chunk in action.posts:
            self._post(Action(kind, micro_batch, chunk))
        if _incoming(self._links, action) is None:
            return None
        place = (action.kind, action.micro_batch, action.chunk)
        if place not in self._receiving:
            self._post(action)
        tensor, work = self._receiving.pop(place)
        work.wait()
        if self._links.stream is not None:
            # Its memory comes from the other stream, which must not use it again too early.
            tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Sends what the action made; does nothing where no stage waits for it."""
        transfer = _outgoing(self._links, action)
        if transfer is None:
            return
        # The other end would wait for ever for the rest of a smaller tensor.
        assert tensor.shape == self._links.shape, (tensor.shape, self._links.shape)
        assert tensor.dtype == self._links.dtype, (tensor.dtype, self._links.dtype)
        tensor = tensor.contiguous()
        self._finish_send(transfer.channel)
        work = _start_send(transfer.channel, tensor, transfer.call)
        self._sending[transfer.channel] = tensor, work

    def finish(self) -> None:
        """Waits for the last sends, after the last action."""
        assert not self._receiving
        for channel in list(self._sending):
            self._finish_send(channel)

    def _post(self, action: Action) -> None:
        links, transfer = self._links, _incoming(self._links, action)
        assert transfer is not None
        with torch.cuda.stream(links.stream) if links.stream is not None else nullcontext():
            tensor = torch.empty(links.shape, dtype=links.dtype, device=links.device)
            work = _start_receive(transfer.channel, tensor, transfer.call)
        self._receiving[action.kind, action.micro_batch, action.chunk] = tensor, work

    def _finish_send(self, channel: Channel) -> None:
        if channel in self._sending:
            _, work = self._sending.pop(channel)
            work.wait()
