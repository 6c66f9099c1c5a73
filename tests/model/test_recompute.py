"""Computing again gives the same bits: losses, gradients and both random streams.

Two micro batches are under way at once, as in a pipeline: forward, forward, backward, backward. So
the streams have moved on when the first one is computed again. The second one has documents that do
not see each other. What is computed again is counted, since a mode that did nothing would give the
same bits too.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lib.layers.attention import attention_backend
from lib.layers.documents import DocumentLayout, document_positions, find_documents
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.model.recompute import Recompute
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.random import seed_default_stream, shard_stream
from tests.distributed import run_on_ranks
from tests.model.models import CONFIGS, PADDED, VOCAB_SIZE, drawn_tokens, fill, rough_weights
from tests.stored import gradients_of

_LAYERS = 3
_CPU = torch.device("cpu")
_STARTS = [np.array([3, 4]), np.array([6])]
_LAYOUT = DocumentLayout(document_positions(_STARTS, 8), find_documents(_STARTS, 8))
# Each with the forwards of a layer and of its core that a micro batch takes, the second ones too.
MODES = {
    "none": (Recompute(), _LAYERS, _LAYERS),
    "selective": (Recompute("selective"), _LAYERS, 2 * _LAYERS),
    "uniform-1": (Recompute("full", "uniform", 1), 2 * _LAYERS, 2 * _LAYERS),
    "uniform-2": (Recompute("full", "uniform", 2), 2 * _LAYERS, 2 * _LAYERS),
    "uniform-9": (Recompute("full", "uniform", 9), 2 * _LAYERS, 2 * _LAYERS),
    "block-1": (Recompute("full", "block", 1), _LAYERS + 1, _LAYERS + 1),
    "block-2": (Recompute("full", "block", 2), _LAYERS + 2, _LAYERS + 2),
    "block-9": (Recompute("full", "block", 9), 2 * _LAYERS, 2 * _LAYERS),
}


def config_of(name, dropout):
    changes = {"num_layers": _LAYERS, "hidden_dropout": dropout, "attention_dropout": dropout}
    return CONFIGS[name].model_copy(update=changes)


def groups_here(*, sequence):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return ParallelGroups()
    stream = shard_stream(1, _CPU, dp_rank=0, pp_rank=0, tp_rank=rank)
    tp = Group(rank, size, dist.group.WORLD, "tp")
    return ParallelGroups(tp=tp, sequence_parallel=sequence, shard_stream=stream)


def counting(function, calls, name):
    def counted(*arguments):
        calls[name] += 1
        return function(*arguments)

    return counted


def step(config, groups, recompute):
    """Losses, gradients, states of the streams, and calls, of two micro batches under way."""
    calls = {"core": 0, "layer": 0}
    core = counting(attention_backend("auto"), calls, "core")
    model = GPTModel(
        config,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=PADDED,
        groups=groups,
        part=whole_model(config),
        options=ModelOptions(core, recompute),
    )
    fill(model, rough_weights(config))
    for layer in model.layers.values():
        layer.forward = counting(layer.forward, calls, "layer")
    losses = [
        model(*(x.T for x in drawn_tokens(seed, 2, 8)), layout)
        for seed, layout in ((1, None), (2, _LAYOUT))
    ]
    for number, loss in enumerate(losses):
        (loss.sum() * (1.0 + number)).backward()
    states = [torch.get_rng_state()]
    if groups.shard_stream is not None:
        states.append(groups.shard_stream.state)
    return [loss.detach() for loss in losses], gradients_of(model), states, calls


def all_modes_on_rank(name, dropout, sequence):
    config = config_of(name, dropout)
    results = {}
    for mode, (recompute, _, _) in MODES.items():
        groups = groups_here(sequence=sequence)
        seed_default_stream(1, dp_rank=0, pp_rank=0)
        stream = groups.shard_stream
        chosen = replace(recompute, stream=stream, draws=dropout > 0)
        results[mode] = step(config, groups, chosen)
    return results


def assert_all_modes_alike(results):
    losses, gradients, states, _ = results["none"]
    for mode, (_, layer_calls, core_calls) in MODES.items():
        its_losses, its_gradients, its_states, calls = results[mode]
        assert calls == {"core": 2 * core_calls, "layer": 2 * layer_calls}, mode
        for one, other in zip(losses + states, its_losses + its_states, strict=True):
            assert torch.equal(one, other), mode
        assert list(gradients) == list(its_gradients)
        for name, value in gradients.items():
            assert torch.equal(its_gradients[name], value), (mode, name)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_mode_gives_the_same_bits(name, dropout):
    (results,) = run_on_ranks(1, all_modes_on_rank, name, dropout, 0)
    assert_all_modes_alike(results)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize(
    ("sequence", "dropout"),
    [
        (True, 0.3),
        pytest.param(True, 0.0, marks=pytest.mark.layouts),
        pytest.param(False, 0.0, marks=pytest.mark.layouts),
        pytest.param(False, 0.3, marks=pytest.mark.layouts),
    ],
)
def test_every_mode_gives_the_same_bits_on_tensor_ranks(name, sequence, dropout):
    ranks = run_on_ranks(2, all_modes_on_rank, name, dropout, sequence)
    for results in ranks:
        assert_all_modes_alike(results)
    (default, shard), (others_default, others_shard) = (rank["none"][2] for rank in ranks)
    assert torch.equal(default, others_default)
    assert not torch.equal(shard, others_shard)


def draws_on_rank(dropout):
    """States of the streams before and after a step, and its losses, recomputed and with none."""
    config, groups = config_of("gpt2", dropout), groups_here(sequence=True)
    seed_default_stream(1, dp_rank=0, pp_rank=0)
    before = [torch.get_rng_state(), groups.shard_stream.state]
    recompute = Recompute("full", stream=groups.shard_stream, draws=dropout > 0)
    losses, _, after, _ = step(config, groups, recompute)
    return losses, [torch.equal(*pair) for pair in zip(before, after, strict=True)]


def test_the_tests_above_have_something_to_replay():
    """With sequence parallelism all masks come from the shard's stream; the two batches differ."""
    plain, dropped = (run_on_ranks(2, draws_on_rank, dropout)[0] for dropout in (0.0, 0.3))
    assert plain[1] == [True, True]
    assert dropped[1] == [True, False]
    assert not torch.equal(plain[0][0], dropped[0][0])


def test_without_its_stream_a_recomputed_step_would_differ():
    """The comparison sees a stream that is not replayed."""
    results = run_on_ranks(2, forgotten_stream_on_rank)[0]
    (right, wrong) = results
    assert any(not torch.equal(right[name], wrong[name]) for name in right)


def forgotten_stream_on_rank():
    config, gradients = config_of("gpt2", 0.3), []
    for forgets in (False, True):
        groups = groups_here(sequence=True)
        seed_default_stream(1, dp_rank=0, pp_rank=0)
        stream = None if forgets else groups.shard_stream
        gradients.append(step(config, groups, Recompute("full", stream=stream, draws=True))[1])
    return gradients


@pytest.mark.parametrize("mode", sorted(MODES))
def test_evaluation_computes_nothing_again_and_keeps_nothing(mode):
    recompute, _, _ = MODES[mode]
    config = config_of("llama", 0.3)
    calls = {"core": 0}
    model = GPTModel(
        config,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=PADDED,
        groups=ParallelGroups(),
        part=whole_model(config),
        options=ModelOptions(
            counting(attention_backend("auto"), calls, "core"), replace(recompute, draws=True)
        ),
    )
    fill(model, rough_weights(config))
    model.eval()
    tokens, labels = drawn_tokens(1, 2, 8)
    with torch.no_grad():
        losses = [model(tokens.T, labels.T) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in pairwise(losses))
    assert not losses[0].requires_grad
    assert calls == {"core": 2 * _LAYERS}
