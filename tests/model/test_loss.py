"""The loss is per token: sums and counts, never a mean of means."""

import numpy as np
import pytest
import torch

from lib.model.loss import MicroBatch, SampleRules, micro_batch, token_losses
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import one_forward_one_backward
from tests.model.models import GPT2, VOCAB_SIZE, build, drawn_tokens, fill, rough_weights
from tests.reference import FLOAT64, plain_losses
from tests.stored import gradients_of


def rough_model():
    model = build(GPT2)
    fill(model, rough_weights(GPT2))
    return model


def test_micro_batch_shifts_by_one():
    windows = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]])
    batch = micro_batch(windows, np.array([True, True, False]))
    assert batch.tokens_SB.T.tolist() == [[1, 2, 3], [5, 6, 7], [0, 0, 0]]
    assert batch.labels_SB.T.tolist() == [[2, 3, 4], [6, 7, 8], [0, 0, 0]]
    assert batch.weights_SB.T.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert batch.num_tokens == 6
    assert (batch.tokens_SB.dtype, batch.labels_SB.dtype) == (torch.int64, torch.int64)
    assert batch.weights_SB.dtype == torch.float32
    assert all(
        tensor.is_contiguous() for tensor in (batch.tokens_SB, batch.labels_SB, batch.weights_SB)
    )
    batch.tokens_SB.zero_()  # a copy: the windows are a map of the corpus
    assert windows[0].tolist() == [1, 2, 3, 4]
    moved = batch.to(torch.device("cpu"))
    assert moved.num_tokens == 6
    assert torch.equal(moved.labels_SB, batch.labels_SB)


EOD = 9
# a b E c d E E f, then the label of f. Documents begin at 3, 6 and 7.
BY_HAND = [1, 2, EOD, 3, 4, EOD, EOD, 5, 6]
# Two samples that only fill the batch, of the same id as the end of a document.
BY_HAND_AND_FILLERS = np.array([BY_HAND, [EOD] * 9, [EOD] * 9])
STARTS = [np.array([3, 6, 7]), np.array([], dtype=np.int64), np.array([], dtype=np.int64)]
_ALL, _NONE = [1] * 8, [0] * 8


@pytest.mark.parametrize(
    ("eod_id", "expected"), [(None, _ALL), (EOD, [1, 0, 1, 1, 0, 0, 1, 1]), (7, _ALL)]
)
@pytest.mark.parametrize("resets", [False, True])
def test_what_counts_in_a_sequence_written_by_hand(eod_id, expected, resets):
    """B20: fillers by their place, ends of documents only if asked for, borders by the index."""
    rules = SampleRules(eod_id, reset_positions=resets, within_documents=resets)
    counted = np.array([True, False, False])
    batch = micro_batch(BY_HAND_AND_FILLERS, counted, rules, STARTS if resets else None)
    assert batch.weights_SB.T.tolist() == [expected, _NONE, _NONE]
    assert batch.weights_SB.is_contiguous()
    assert batch.num_tokens == sum(expected)
    if not resets:
        assert batch.layout is None
        return
    assert batch.layout.positions_SB.T.tolist()[0] == [0, 1, 2, 0, 1, 2, 0, 0]
    assert batch.layout.documents.number_SB.T.tolist()[0] == [0, 0, 0, 1, 1, 1, 2, 3]
    assert batch.to(torch.device("cpu")).layout.documents.longest == 8


def test_fillers_do_not_count():
    model, weights = rough_model(), rough_weights(GPT2)
    tokens, labels = drawn_tokens(1, 3, 7)
    windows = torch.cat((tokens, labels[:, -1:]), dim=1).numpy()
    batch = micro_batch(windows, np.array([True, False, True]))
    losses = token_losses(model, batch)
    expected = plain_losses(weights, GPT2, VOCAB_SIZE, tokens, labels)
    expected[1] = 0.0
    torch.testing.assert_close(losses.T, expected, **FLOAT64)
    assert batch.num_tokens == 14


@pytest.mark.parametrize(("counted", "rules"), [(False, SampleRules()), (True, SampleRules(0))])
def test_without_a_counted_token_the_loss_is_zero_and_there_is_no_gradient(counted, rules):
    """B41: only fillers, or a document made of ends of documents, which do not count."""
    model = rough_model()
    batch = micro_batch(np.zeros((2, 8), dtype=np.int64), np.full(2, counted), rules)
    assert batch.num_tokens == 0
    loss = token_losses(model, batch).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert all(value.grad.eq(0).all() for value in model.parameters())


def masked_rows(counts, length):
    """Rows with so many counted tokens each."""
    tokens, labels = drawn_tokens(2, len(counts), length)
    weights = torch.zeros(len(counts), length, dtype=torch.float64)
    for row, count in enumerate(counts):
        weights[row, :count] = 1.0
    return tokens, labels, weights


def pieces(tokens, labels, weights, size):
    return [
        MicroBatch(t.T, y.T, w.T, int(w.sum()))
        for t, y, w in zip(tokens.split(size), labels.split(size), weights.split(size), strict=True)
    ]


@pytest.mark.parametrize("size", [4, 2, 1])
def test_rows_of_1_9_3_and_0_tokens_weigh_by_their_tokens(size):
    """B36: the same loss and gradient for micro batches of 4, 2 and 1 rows."""
    tokens, labels, counted = masked_rows((1, 9, 3, 0), 10)
    weights = {key: value.requires_grad_() for key, value in rough_weights(GPT2).items()}
    expected = plain_losses(weights, GPT2, VOCAB_SIZE, tokens, labels)
    expected = (expected * counted).sum() / 13
    expected.backward()
    model = rough_model()
    batches = pieces(tokens, labels, counted, size)
    losses = run_plan(
        one_forward_one_backward(0, 1, len(batches)),
        lambda _chunk, number, _received: token_losses(model, batches[number]).sum(),
        grad_scale=1.0 / sum(batch.num_tokens for batch in batches),
    )
    torch.testing.assert_close(torch.stack(losses).sum() / 13, expected.detach(), **FLOAT64)
    found = gradients_of(model)
    assert set(found) == set(weights)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, weights[key].grad, **FLOAT64)
