"""Positions and attention by document against the plain model, document by document, in float64.

Also where the sequence is cut over ranks, where layers are, and from windows to summed losses.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, StageSlice
from lib.model.loss import SampleRules, micro_batch, run_chunk, token_losses
from lib.parallel.groups import Group, ParallelGroups
from tests.distributed import run_on_ranks
from tests.model.models import (
    CONFIGS,
    PADDED,
    VOCAB_SIZE,
    build,
    drawn_tokens,
    fill,
    join,
    rough_weights,
)
from tests.reference import FLOAT64, plain_losses
from tests.stored import gradients_of

LENGTH = 10
# Documents of one token, at the ends too; a sequence without a border; a border at the last label.
STARTS = [np.array([1, 4, 5, 9]), np.array([], dtype=np.int64), np.array([6, 10])]
RULES = {
    "positions": SampleRules(reset_positions=True),
    "attention": SampleRules(within_documents=True),
    "both": SampleRules(reset_positions=True, within_documents=True),
}


def batch_of(rules):
    tokens, labels = drawn_tokens(1, len(STARTS), LENGTH)
    windows = torch.cat((tokens, labels[:, -1:]), dim=1).numpy()
    return micro_batch(windows, np.ones(len(STARTS), dtype=bool), rules, STARTS)


def slow_losses(weights, config, rules):
    """Each document goes through the model alone; or each sequence, where attention spans it."""
    tokens, labels = drawn_tokens(1, len(STARTS), LENGTH)
    rows = []
    for row, starts in enumerate(STARTS):
        borders = [0, *(start for start in starts.tolist() if start < LENGTH), LENGTH]
        places = torch.arange(LENGTH)
        if rules.reset_positions:
            places = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(borders)])
        if not rules.within_documents:
            borders = [0, LENGTH]
        pieces = [
            plain_losses(
                weights,
                config,
                VOCAB_SIZE,
                tokens[row : row + 1, first:end],
                labels[row : row + 1, first:end],
                places[first:end],
            )
            for first, end in itertools.pairwise(borders)
        ]
        rows.append(torch.cat(pieces, dim=1))
    return torch.cat(rows)


@functools.cache
def slow_losses_and_gradients(name, case):
    config, rules = CONFIGS[name], RULES[case]
    weights = {key: value.requires_grad_() for key, value in rough_weights(config).items()}
    losses = slow_losses(weights, config, rules)
    (losses * factors()).sum().backward()
    return losses.detach(), {key: value.grad for key, value in weights.items()}


def factors():
    return torch.linspace(-1.0, 2.0, len(STARTS) * LENGTH, dtype=torch.float64).view(-1, LENGTH)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("case", sorted(RULES))
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_losses_and_gradients(name, case, backend):
    config, rules = CONFIGS[name], RULES[case]
    model = build(config, backend=backend)
    fill(model, rough_weights(config))
    losses = token_losses(model, batch_of(rules))
    (losses.T * factors()).sum().backward()
    expected, gradients = slow_losses_and_gradients(name, case)
    torch.testing.assert_close(losses.T.detach(), expected, **FLOAT64)
    found = gradients_of(model)
    assert set(found) == set(gradients)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[key], **FLOAT64)


def test_each_rule_changes_the_loss():
    """Or the cases above would compare the same thing three times."""
    losses = [
        slow_losses(rough_weights(CONFIGS["gpt2"]), CONFIGS["gpt2"], rules)
        for rules in (SampleRules(), *RULES.values())
    ]
    for one, other in itertools.combinations(losses, 2):
        assert (one - other)[[0, 2]].abs().max() > 1e-3
        assert torch.equal(one[1], other[1])  # the sequence that is one document


def every_case_on_rank():
    tp = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, "tp")
    groups = ParallelGroups(tp=tp, sequence_parallel=True)
    results = {}
    for name, case in itertools.product(("gpt2", "llama"), RULES):
        model = model_of(CONFIGS[name], StageSlice(range(2), first=True, last=True), groups)
        losses = token_losses(model, batch_of(RULES[case]))
        (losses.T * factors()).sum().backward()
        results[name, case] = losses.T.detach(), gradients_of(model)
    return results


def model_of(config, part, groups):
    model = GPTModel(
        config,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=PADDED,
        groups=groups,
        options=ModelOptions(attention_backend("auto")),
        part=part,
    )
    fill(model, rough_weights(config))
    return model


def test_sequences_cut_over_ranks():
    ranks = run_on_ranks(2, every_case_on_rank)
    for name, case in ranks[0]:
        expected, gradients = slow_losses_and_gradients(name, case)
        found = [rank[name, case] for rank in ranks]
        for losses, _ in found:
            torch.testing.assert_close(losses, expected, **FLOAT64)
        for key, gradient in gradients.items():
            whole = join([each[key] for _, each in found], gradient.shape)
            torch.testing.assert_close(whole, gradient, **FLOAT64)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_later_stage_knows_the_documents_too(name):
    config = CONFIGS[name].model_copy(update={"tie_embeddings": False})
    batch = batch_of(RULES["both"])
    hidden = None
    for part in (
        StageSlice(range(1), first=True, last=False),
        StageSlice(range(1, 2), first=False, last=True),
    ):
        hidden = run_chunk(model_of(config, part, ParallelGroups()), batch, hidden)
    expected = slow_losses(rough_weights(config), config, RULES["both"]).sum()
    torch.testing.assert_close(hidden.detach(), expected, **FLOAT64)
