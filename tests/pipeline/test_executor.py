"""The executor: what a plan says is what happens, and gradients of micro batches add up."""

import pytest
import torch

from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import forward_only, one_forward_one_backward
from tests.reference import FLOAT64


def small_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    ).double()


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 3])  # the first of three: several graphs wait at once
def test_gradients_of_micro_batches_are_those_of_the_batch(micro_batches, stages):
    rows = torch.randn(8, 5, dtype=torch.float64)
    whole, pieces = small_model(), small_model()
    (whole(rows).square().sum() * 0.125).backward()
    parts = rows.chunk(micro_batches)
    losses = run_plan(
        one_forward_one_backward(0, stages, micro_batches),
        lambda number: pieces(parts[number]).square().sum(),
        grad_scale=0.125,
    )
    assert len(losses) == micro_batches
    for part, loss in zip(parts, losses, strict=True):  # by number, not scaled, detached
        torch.testing.assert_close(loss, whole(part).square().sum().detach(), **FLOAT64)
        assert not loss.requires_grad
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, **FLOAT64)


def test_forward_only_keeps_no_graph():
    model = small_model()
    grad_modes, outputs = [], []

    def forward(number):
        grad_modes.append(torch.is_grad_enabled())
        outputs.append(model(torch.full((2, 5), float(number), dtype=torch.float64)).sum())
        return outputs[-1]

    losses = run_plan(forward_only(3), forward)
    assert grad_modes == [False] * 3
    assert all(output.grad_fn is None for output in outputs)
    assert [loss.item() for loss in losses] == [output.item() for output in outputs]
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_inside_no_grad_still_trains():
    weight = torch.ones(1, requires_grad=True)
    with torch.no_grad():
        run_plan(one_forward_one_backward(0, 1, 1), lambda _: (weight * 3).sum())
        assert not torch.is_grad_enabled()
    assert weight.grad.item() == 3.0


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_before_backward_is_told_of_the_last_one_only(stages):
    weight = torch.ones(1, requires_grad=True)
    events = []

    def forward(number):
        events.append(f"F{number}")
        return (weight * 2.0).sum()

    def before_backward(is_last):
        events.append((is_last, 0.0 if weight.grad is None else weight.grad.item()))

    run_plan(one_forward_one_backward(0, stages, 4), forward, before_backward=before_backward)
    told = [event for event in events if isinstance(event, tuple)]
    # Called right before each backward: the gradient so far is that of the earlier ones.
    assert told == [(False, 0.0), (False, 2.0), (False, 4.0), (True, 6.0)]
    assert weight.grad.item() == 8.0
    assert events[:stages] == [f"F{number}" for number in range(min(stages, 4))]


def test_graphs_are_freed_after_their_backward():
    weight = torch.ones(1, requires_grad=True)
    alive = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            return x * 1.0

        @staticmethod
        def backward(ctx, *grads):
            return grads[0]

    class Token:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    most = []

    def forward(_):
        loss = Watch.apply(weight).sum()
        most.append(len(alive))
        return loss

    run_plan(one_forward_one_backward(0, 1, 5), forward)
    # The graph of the micro batch before may live until its name is taken again.
    assert max(most) <= 2
    assert not alive


def test_empty_plan_of_an_evaluation():
    assert run_plan(forward_only(0), lambda number: torch.zeros(())) == []
