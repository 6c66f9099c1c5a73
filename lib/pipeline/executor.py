"""Runs a schedule: the one way in which a micro batch goes through the model."""

from collections.abc import Callable

import torch
from torch import Tensor

from lib.pipeline.schedule import Action, Kind


def run_plan(
    plan: list[Action],
    forward: Callable[[int], Tensor],
    *,
    grad_scale: float = 1.0,
    before_backward: Callable[[bool], None] | None = None,
) -> list[Tensor]:
    """Runs a stage's plan.

    Args:
        plan: from ``lib.pipeline.schedule``; a plan without backward actions keeps no graph.
        forward: gives the summed loss (a scalar) of a micro batch by its number.
        grad_scale: factor on every loss before its backward, such as 1 / counted tokens.
        before_backward: called with whether the coming backward is the step's last, so that
            gradients are reduced once.

    Returns:
        The summed losses, detached, by micro batch.
    """
    losses: dict[int, Tensor] = {}
    waiting: dict[int, Tensor] = {}  # outputs whose backward is still to come
    trains = any(action.kind is Kind.BACKWARD for action in plan)
    with torch.set_grad_enabled(trains):
        for action in plan:
            if action.kind is Kind.FORWARD:
                output = forward(action.micro_batch)
                losses[action.micro_batch] = output.detach()
                if trains:
                    waiting[action.micro_batch] = output
                continue
            if before_backward is not None:
                before_backward(action.last_backward)
            output = waiting.pop(action.micro_batch)
            torch.autograd.backward(output, torch.full_like(output, grad_scale))
    assert not waiting
    return [losses[number] for number in sorted(losses)]
