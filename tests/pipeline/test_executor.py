"""The executor: what a plan says is what happens, and every layout gives one rank's numbers."""

import gc
from dataclasses import dataclass, field

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lib.parallel.mesh import build_mesh, groups_of
from lib.pipeline.communication import Links
from lib.pipeline.executor import run_plan
from lib.pipeline.plan import stage_plan
from lib.pipeline.schedule import (
    forward_only,
    group_size,
    one_forward_one_backward,
)
from tests.distributed import run_on_ranks
from tests.pipeline.toy_stack import SHAPE, Chunk, batches, gradients_of, losses_of
from tests.reference import FLOAT64

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def small_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    ).double()


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [0.125, torch.tensor(0.125, dtype=torch.float32)])
def test_gradients_of_micro_batches_are_those_of_the_batch(micro_batches, scale):
    rows = torch.randn(8, 5, dtype=torch.float64)
    whole, pieces = small_model(), small_model()
    (whole(rows).square().sum() * 0.125).backward()
    parts = rows.chunk(micro_batches)
    losses = run_plan(
        one_forward_one_backward(0, 1, micro_batches),
        lambda chunk, number, received: pieces(parts[number]).square().sum(),
        grad_scale=scale,
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

    def forward(chunk, number, received):
        assert (chunk, received) == (0, None)
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
        run_plan(one_forward_one_backward(0, 1, 1), lambda *_: (weight * 3).sum())
        assert not torch.is_grad_enabled()
    assert weight.grad.item() == 3.0


def test_before_backward_is_told_of_the_last_one_only():
    weight = torch.ones(1, requires_grad=True)
    told = []

    def before_backward(chunk, is_last):
        told.append((chunk, is_last, 0.0 if weight.grad is None else weight.grad.item()))

    plan = one_forward_one_backward(0, 1, 4)
    run_plan(plan, lambda *_: (weight * 2.0).sum(), before_backward=before_backward)
    # Called right before each backward: the gradient so far is that of the earlier ones.
    assert told == [(0, False, 0.0), (0, False, 2.0), (0, False, 4.0), (0, True, 6.0)]
    assert weight.grad.item() == 8.0


def test_after_backward_is_told_when_the_gradient_is_there():
    weight = torch.ones(1, requires_grad=True)
    told = []
    run_plan(
        one_forward_one_backward(0, 1, 3),
        lambda *_: (weight * 2.0).sum(),
        before_backward=lambda chunk, _: told.append(("before", chunk)),
        after_backward=lambda chunk: told.append((weight.grad.item(), chunk)),
    )
    assert told == [(what, 0) for total in (2.0, 4.0, 6.0) for what in ("before", total)]


def test_empty_plan_of_an_evaluation():
    assert run_plan(forward_only(0), lambda *_: torch.zeros(())) == []


class Graph(torch.autograd.Function):
    """Identity that knows how many graphs it is part of."""

    alive = 0

    class Token:
        def __init__(self):
            Graph.alive += 1

        def __del__(self):
            Graph.alive -= 1

    @staticmethod
    def forward(ctx, x):
        ctx.token = Graph.Token()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


@dataclass
class Stage:
    """One rank's chunks, and what was seen of them while they ran."""

    links: Links
    chunks: list
    outputs: list = field(default_factory=list)
    most_outputs: int = 0
    most_graphs: int = 0
    last_backwards: list = field(default_factory=list)

    def run(self, plan, micro_batches):
        def forward(chunk, number, received):
            assert (received is None) == self.links.is_first(chunk)
            self._count_outputs()
            x = self.chunks[chunk](micro_batches[number], received)
            x = Graph.apply(x)
            if not self.links.is_last(chunk):
                self.outputs.append(StorageWeakRef(x.untyped_storage()))
            self.most_graphs = max(self.most_graphs, Graph.alive)
            return x

        def before_backward(chunk, is_last):
            self._count_outputs()
            if is_last:
                self.last_backwards.append(chunk)

        return run_plan(plan, forward, self.links, grad_scale=0.5, before_backward=before_backward)

    def _count_outputs(self):
        alive = sum(not output.expired() for output in self.outputs)
        self.most_outputs = max(self.most_outputs, alive)


def links_of(groups, chunks):
    links = Links(groups.channels, groups.pp.rank, groups.pp.size, chunks, SHAPE, torch.float64)
    links.connect()
    return links


def steps_of_a_stage(pipeline, cases):
    """Training, validation and training again for each (chunks, micro batches)."""
    groups = groups_of(build_mesh("cpu", tensor=1, pipeline=pipeline, data=1))
    results = []
    for chunks, count in cases:
        links = links_of(groups, chunks)
        numbers = [links.global_chunk(chunk) for chunk in range(chunks)]
        stage = Stage(links, [Chunk(number, pipeline * chunks) for number in numbers])
        training = stage_plan(links.stage, pipeline, chunks, count, trains=True)
        validation = stage_plan(links.stage, pipeline, chunks, count + 1, trains=False)
        losses = [
            stage.run(training, batches(count, seed=1)),
            stage.run(validation, batches(count + 1, seed=2)),
            stage.run(training, batches(count, seed=3)),
        ]
        gradients = {}
        for number, chunk in zip(numbers, stage.chunks, strict=True):
            gradients |= gradients_of(chunk, number)
        seen = (stage.most_outputs, stage.most_graphs, Graph.alive, stage.last_backwards)
        results.append((losses, gradients, seen))
    return results


def steps_in_one_piece(total, count):
    chunks = [Chunk(number, total) for number in range(total)]
    losses = [losses_of(chunks, batches(count + more, seed)) for more, seed in MORE_AND_SEED]
    torch.stack(losses[0] + losses[2]).sum().mul(0.5).backward()
    gradients = {}
    for number, chunk in enumerate(chunks):
        gradients |= gradients_of(chunk, number)
    return [[loss.detach() for loss in step] for step in losses], gradients


MORE_AND_SEED = ((0, 1), (1, 2), (0, 3))
CASES = [(1, 1), (1, 3), (1, 8), (2, 1), (2, 4), (2, 7), (3, 6)]


@pytest.mark.parametrize("pipeline", [2, 3, pytest.param(4, marks=pytest.mark.layouts)])
def test_every_pipeline_gives_the_numbers_of_one_piece(pipeline):
    by_stage = run_on_ranks(pipeline, steps_of_a_stage, pipeline, CASES)
    for case, (chunks, count) in enumerate(CASES):
        losses, gradients = steps_in_one_piece(pipeline * chunks, count)
        found = {}
        for stage in range(pipeline):
            stage_losses, stage_gradients, seen = by_stage[stage][case]
            found |= stage_gradients
            if stage == pipeline - 1:
                torch.testing.assert_close(stage_losses, losses, **EXACT)
            else:
                assert stage_losses == [[], [], []]
            check_memory(stage, pipeline, chunks, count, seen)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, **EXACT)


def check_memory(stage, pipeline, chunks, count, seen):
    most_outputs, most_graphs, graphs_left, last_backwards = seen
    # Of what was sent, only what the last transfers may still read is alive; the rest is in
    # flight without its output.
    assert most_outputs <= (1 if chunks == 1 else pipeline)
    bound = min(pipeline - stage, count)
    if chunks > 1:
        group = group_size(pipeline, count)
        bound = min(2 * (pipeline - stage - 1) + (chunks - 1) * group + 1, count * chunks)
    assert most_graphs == bound
    assert graphs_left == 0
    assert last_backwards == [*reversed(range(chunks))] * 2


class FaultError(Exception):
    pass


def one_stage_fails():
    """The last stage raises amid a step, with a receive under way; nobody waits for ever."""
    groups = groups_of(build_mesh("cpu", tensor=1, pipeline=2, data=1))
    links = links_of(groups, 1)
    stage = Chunk(links.stage, 2)

    def forward(chunk, number, received):
        if links.stage == 1 and number == 1:
            raise FaultError
        return stage(batches(4, seed=1)[number], received)

    try:
        run_plan(stage_plan(links.stage, 2, 1, 4, trains=True), forward, links)
    except FaultError:
        ended = "fault"
    except RuntimeError:  # the other end closed its connections
        ended = "peer lost"
    gc.collect()  # what was begun is dropped now, and the process group with the return
    return ended


def test_a_fault_on_one_stage_ends_all():
    assert run_on_ranks(2, one_stage_fails) == ["peer lost", "fault"]
