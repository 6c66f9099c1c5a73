"""Runs a schedule: the one way in which a micro batch goes through the model.

What a stage does is written in its plan; this file only follows it. A pipeline of one stage is a
plan whose actions neither receive nor send.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lib.pipeline.communication import Links, Traffic
from lib.pipeline.schedule import Action, Kind

Forward = Callable[[int, int, Tensor | None], Tensor]

ONE_STAGE = Links()


def run_plan(
    plan: Sequence[Action],
    forward: Forward,
    links: Links = ONE_STAGE,
    *,
    grad_scale: float | Tensor = 1.0,
    before_backward: Callable[[int, bool], None] | None = None,
    after_backward: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """Runs a stage's plan; all stages of the pipeline call this with theirs.

    If ``forward`` raises, transfers already begun are abandoned, and the other stages wait until
    this process ends its process groups: the run cannot go on.

    Args:
        plan: from ``lib.pipeline.plan``; a plan without backward actions keeps no graph.
        forward: takes chunk, micro batch and the hidden states received from the chunk before
            (None for the first of the chain). Gives the summed loss (a scalar) on the last chunk
            of the chain, hidden states of the same shape as received ones on the others.
        links: connections of the stage; by default it is the only one.
        grad_scale: factor on every loss before its backward, such as 1 / counted tokens; a
            scalar tensor is not read by the host.
        before_backward: called with chunk and whether the coming backward is the chunk's last of
            the step, so that gradients are reduced once.
        after_backward: called with the chunk when that backward is done.

    Returns:
        The summed losses, detached, by micro batch, on the last stage; nothing on the others.
    """
    trains = any(action.kind is Kind.BACKWARD for action in plan)
    run = _Run(forward, links, Traffic(links), grad_scale, trains)
    with torch.set_grad_enabled(trains):
        for action in plan:
            if action.kind is Kind.FORWARD:
                run.go_forward(action)
                continue
            if before_backward is not None:
                before_backward(action.chunk, action.last_backward)
            run.go_backward(action)
            if after_backward is not None:
                after_backward(action.chunk)
    run.traffic.finish()
    assert not run.waiting
    return [run.losses[number] for number in sorted(run.losses)]


@dataclass(frozen=True)
class _Waiting:
    """What the backward of a micro batch starts from and ends at.

    An edge and not the output: backward needs the graph only, so that the output's memory is
    free as soon as it is sent.
    """

    edge: GradientEdge
    received: Tensor | None


@dataclass(frozen=True)
class _Run:
    forward: Forward
    links: Links
    traffic: Traffic
    grad_scale: float | Tensor
    trains: bool
    waiting: dict[tuple[int, int], _Waiting] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def go_forward(self, action: Action) -> None:
        received = self.traffic.receive(action)
        if received is not None:
            received.requires_grad_(self.trains)
        output = self.forward(action.chunk, action.micro_batch, received)
        if self.trains:
            waiting = _Waiting(get_gradient_edge(output), received)
            self.waiting[action.chunk, action.micro_batch] = waiting
        if self.links.is_last(action.chunk):
            self.losses[action.micro_batch] = output.detach()
        else:
            self.traffic.send(action, output.detach())

    def go_backward(self, action: Action) -> None:
        waiting = self.waiting.pop((action.chunk, action.micro_batch))
        gradient = self.traffic.receive(action)
        if gradient is None:
            gradient = torch.ones_like(self.losses[action.micro_batch]).mul_(self.grad_scale)
        torch.autograd.backward(waiting.edge, gradient)
        if waiting.received is not None:
            assert waiting.received.grad is not None
            self.traffic.send(action, waiting.received.grad)
