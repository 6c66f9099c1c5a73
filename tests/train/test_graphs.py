"""Replayed micro batches: what may be recorded, when, and that nothing of the result changes.

A CPU has no CUDA graphs. Here a recording computes anew at each use, but keeps their rules: memory
of its own for inputs and results, which the next use overwrites, and forwards and backwards in
turns. tests/gpu/test_graphs_gpu.py has the real ones.
"""

import pytest
import torch

from lib.config.operation import RuntimeConfig
from lib.config.schema import ParallelConfig
from lib.parallel.groups import Group, ParallelGroups
from lib.pipeline.graphs import Replayed
from lib.train import setup
from lib.train.comparison import compare, train_on_rank, with_layout
from lib.train.graphs import SETTLED_AFTER, StepGraphs, graphs_obstacle
from tests.distributed import run_on_ranks
from tests.train.tiny_run import tiny_config, write_tokens

ROOM = (100, 10, 9)
STEPS = 8


class ComputedAnew:
    made = released = 0

    def __init__(self, compute, inputs, received):
        type(self).made += 1
        self.compute = compute
        self.inputs = [x.clone() for x in inputs]
        self.received = None if received is None else received.detach().clone().requires_grad_()
        self.output = None

    def forward(self, inputs, received):
        assert self.output is None, "used for a second micro batch before the backward of the first"
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        if self.received is not None:
            self.received.detach().copy_(received)
            self.received.grad = None
        with torch.enable_grad():
            self.output = self.compute(self.inputs, self.received)
        return self.output.detach().clone()

    def backward(self, gradient):
        torch.autograd.backward(self.output, gradient.clone())
        self.output = None
        return None if self.received is None else self.received.grad.clone()

    def release(self):
        type(self).released += 1


class CannotRecord:
    def __init__(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")


def train_replayed(texts, *, can_record=True):
    """Trains by each configuration; outcomes, how many recordings were made, why there are none."""
    found = []
    for text in texts:
        ComputedAnew.made = ComputedAnew.released = 0
        made = []

        def step_graphs(*args, made=made, **options):
            record = ComputedAnew if can_record else CannotRecord
            made.append(
                StepGraphs(*args, record=record, memory=lambda: ROOM, clock=lambda: 0.0, **options)
            )
            return made[0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "StepGraphs", step_graphs)
            patch.setattr(setup, "graphs_obstacle", lambda *_: None)
            outcome = train_on_rank(text, RuntimeConfig().model_dump_json(), STEPS, "cpu")
        assert ComputedAnew.released == ComputedAnew.made, "a process group could not end"
        found.append((outcome, ComputedAnew.made, made[0].obstacle))
    return found


def train_unrecorded(texts):
    return train_replayed(texts, can_record=False)


def train_plainly(texts):
    runtime = RuntimeConfig().model_dump_json()
    return [train_on_rank(text, runtime, STEPS, "cpu") for text in texts]


LLAMA = {
    "model__position_embedding": "rope",
    "model__normalization": "rmsnorm",
    "model__activation": "swiglu",
    "model__bias": False,
    "model__num_layers": 4,
}
GPT2 = {"model__num_layers": 4, "model__tie_embeddings": True}


def configs(folder, **parallel):
    corpus = write_tokens(folder)
    return [
        with_layout(
            tiny_config(
                corpus, training__train_iters=STEPS, training__global_batch_size=16, **kind
            ),
            ParallelConfig(**parallel),
        ).to_json()
        for kind in (LLAMA, GPT2)
    ]


# Recordings a rank makes: one for each micro batch that is under way at once, in each chunk.
@pytest.mark.parametrize(
    ("parallel", "most"),
    [
        ({}, 1),
        pytest.param({"tensor": 2, "sequence": True}, 1, marks=pytest.mark.layouts),
        pytest.param({"pipeline": 2}, 2, marks=pytest.mark.layouts),
        ({"pipeline": 2, "virtual_stages": 2}, 6),
        pytest.param({"data": 2}, 1, marks=pytest.mark.layouts),
    ],
)
def test_a_replayed_run_is_the_run_itself(tmp_path, parallel, most):
    texts = configs(tmp_path, **parallel)
    processes = 1 if not parallel else 2
    plain = run_on_ranks(processes, train_plainly, texts)[0]
    ranks = run_on_ranks(processes, train_replayed, texts)
    for (outcome, _, obstacle), truth in zip(ranks[0], plain, strict=True):
        assert compare(outcome, truth).worst() == 0.0
        assert obstacle is None
    made = [count for rank in ranks for _, count, _ in rank]
    assert max(made) == most
    assert min(made) >= 1


def fresh(seconds=(), room=ROOM, *, shares_state=False):
    """As at the start of a process; seconds are those of the steps that are timed."""
    moments = []
    timed = iter(seconds or [0.0] * 4)
    for step in range(1, SETTLED_AFTER + 4):
        moments.append(0.0)
        if step in (2, 3, 5, 6):
            moments.append(next(timed))
    return StepGraphs(
        None,
        None,
        shares_state=shares_state,
        record=ComputedAnew,
        memory=lambda: room,
        clock=lambda: moments.pop(0),
    )


def take_steps(found, count):
    on = []
    for _ in range(count):
        found.begin_step()
        on.append(found.is_on)
        found.end_step()
    return on


def test_graphs_that_are_faster_stay(capsys):
    found = fresh([0.5, 0.4, 0.3, 0.2])
    assert take_steps(found, 9) == [False] * 3 + [True] * 6
    assert "CUDA graphs: on, 400 ms a step without, 200 with" in capsys.readouterr().out


def test_graphs_that_are_no_faster_go(capsys):
    found = fresh([0.5, 0.4, 0.5, 0.397])
    assert take_steps(found, 9) == [False] * 3 + [True] * 3 + [False] * 3
    assert "CUDA graphs: off, no faster: 400 ms a step without" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("room", "shares_state", "fits"),
    [
        ((100, 60, 20), False, True),
        ((100, 90, 60), False, False),
        ((100, 60, 20), True, False),
        ((100, 50, 20), True, True),
    ],
)
def test_graphs_need_room(room, shares_state, fits, capsys):
    found = fresh(room=room, shares_state=shares_state)
    assert take_steps(found, 4)[-1] is fits
    assert ("memory" in capsys.readouterr().out) is not fits


def test_what_cannot_be_recorded_runs_as_before(tmp_path):
    texts = configs(tmp_path)
    plain = run_on_ranks(1, train_plainly, texts)[0]
    found = run_on_ranks(1, train_unrecorded, texts)[0]
    for (outcome, made, obstacle), truth in zip(found, plain, strict=True):
        assert compare(outcome, truth).worst() == 0.0
        assert made == 0
        assert obstacle == "recording does not fit into the GPU's memory"


def test_what_a_broken_off_step_was_using_goes_too():
    weight = torch.ones(3, requires_grad=True)
    ComputedAnew.made = ComputedAnew.released = 0
    replayed = Replayed(lambda inputs, _: (weight * inputs[0]).sum(), ComputedAnew)
    for _ in range(2):  # no backward comes to either
        replayed((torch.ones(3),), None)
    replayed.release()
    assert (ComputedAnew.made, ComputedAnew.released) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "runtime", "groups", "device", "says"),
    [
        ({}, {}, {}, "cuda", None),
        ({}, {}, {}, "cpu", "no GPU"),
        ({}, {"cuda_graphs": "off"}, {}, "cuda", "cuda_graphs is off"),
        ({"model__hidden_dropout": 0.1}, {}, {}, "cuda", "dropout"),
        ({"model__attention_dropout": 0.1}, {}, {}, "cuda", "dropout"),
        ({"data__attention": "document"}, {}, {}, "cuda", "documents"),
        ({"data__positions": "document"}, {}, {}, "cuda", "documents"),
        (
            {"data__phases": ({"from_samples": 24, "seq_length": 8},)},
            {},
            {},
            "cuda",
            "phases",
        ),
        ({"parallel__sharding": "gradients"}, {}, {"shards": Group(0, 2)}, "cuda", "sharding"),
        ({"parallel__sharding": "gradients"}, {}, {}, "cuda", None),
        ({}, {}, {"world": Group(0, 2), "tp": Group(0, 2)}, "cuda", None),
        ({}, {}, {"world": Group(0, 2, watch=print)}, "cuda", "launch.debug"),
    ],
)
def test_what_may_be_recorded(tmp_path, changes, runtime, groups, device, says):
    config = tiny_config(write_tokens(tmp_path), **changes)
    found = graphs_obstacle(
        config, RuntimeConfig(**runtime), ParallelGroups(**groups), torch.device(device)
    )
    assert (found is None) == (says is None)
    assert says is None or says in found
