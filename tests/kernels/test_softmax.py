"""The softmax of attention scores against float64 autograd of the plain formula."""

import math

import pytest
import torch

from kernels.softmax import scaled_masked_softmax
from tests.kernels.closeness import assert_close, drawn, exact

# Batch, heads, queries, keys; causal; hidden keys. Blocks have up to 4096 keys.
CASES = [
    ((1, 1, 1, 1), True, None),
    ((1, 2, 5, 5), False, None),
    ((2, 1, 5, 5), True, "pairs"),
    ((2, 2, 3, 9), True, None),
    ((2, 2, 3, 9), True, "keys"),
    ((2, 2, 3, 9), False, "turned"),
    ((1, 1, 6, 4), True, None),  # the first two queries see nothing
    ((2, 1, 4, 77), False, "pairs"),
    ((2, 2, 2, 77), True, "turned"),
    ((1, 1, 3, 4098), True, None),  # one query sees as many keys as a block holds
    ((1, 2, 2, 4100), False, "keys"),
    ((1, 1, 2, 9001), True, "pairs"),
]
SCALE = 0.37


def drawn_hidden(kind, shape, device):
    batch, _, queries, keys = shape
    generator = torch.Generator().manual_seed(2)
    match kind:
        case None:
            return None
        case "pairs":
            hidden = torch.rand(batch, 1, queries, keys, generator=generator) < 0.4
            hidden[0, 0, -1] = True  # a query that sees nothing
        case "keys":
            hidden = torch.rand(batch, 1, 1, keys, generator=generator) < 0.4
        case "turned":  # no dimension contiguous
            turned = torch.rand(keys, queries, 1, 2 * batch, generator=generator)
            hidden = (turned < 0.4).permute(3, 2, 1, 0)[::2]
    return hidden.to(device)


def unseen_keys(shape, hidden=None, *, causal):
    queries, keys = shape[-2:]
    unseen = torch.zeros(queries, keys, dtype=torch.bool)
    if causal:
        query, key = torch.arange(queries).unsqueeze(1), torch.arange(keys)
        unseen = key > query + keys - queries
    return (unseen if hidden is None else unseen | hidden.cpu()).expand(shape)


def plain_softmax(scores, scale, unseen):
    masked = (scores * scale).masked_fill(unseen, -math.inf)
    return masked.softmax(-1).masked_fill(unseen, 0.0)


@pytest.mark.parametrize(("shape", "causal", "kind"), CASES)
def test_weights_and_gradient(shape, causal, kind, dtype, device):
    leaf = 3.0 * drawn(shape, dtype, device, seed=1)
    leaf.requires_grad_()
    hidden = drawn_hidden(kind, shape, device)
    scores = leaf.clone()
    weights = scaled_masked_softmax(scores, SCALE, causal=causal, hidden=hidden)
    assert weights.data_ptr() == scores.data_ptr()
    kept = weights.detach().clone()
    upstream = drawn(shape, dtype, device, seed=3)
    weights.backward(upstream)
    assert leaf.grad.data_ptr() == scores.data_ptr()

    true_scores, unseen = exact(leaf), unseen_keys(shape, hidden, causal=causal)
    truth = plain_softmax(true_scores, SCALE, unseen)
    truth.backward(exact(upstream))
    assert_close(kept, truth.detach(), dtype)
    assert_close(leaf.grad, true_scores.grad, dtype)
    assert kept.cpu().masked_select(unseen).eq(0).all()
    assert leaf.grad.cpu().masked_select(unseen).eq(0).all()


def test_attention_of_two_products(device):
    """Each overwritten tensor is one that no other backward needs."""
    leaves = [drawn((1, 2, 7, 8), torch.float32, device, seed=seed) for seed in range(3)]
    q, k, v = (x.requires_grad_() for x in leaves)
    context = scaled_masked_softmax(q @ k.transpose(-1, -2), SCALE, causal=True) @ v
    context.sum().backward()
    true_q, true_k, true_v = true_leaves = [exact(x) for x in leaves]
    unseen = unseen_keys((7, 7), causal=True)
    truth = plain_softmax(true_q @ true_k.transpose(-1, -2), SCALE, unseen) @ true_v
    truth.sum().backward()
    assert_close(context.detach(), truth.detach(), torch.float32)
    for leaf, true in zip(leaves, true_leaves, strict=True):
        assert_close(leaf.grad, true.grad, torch.float32)


def test_large_scores_do_not_overflow(device):
    scores = torch.tensor([1e38, 1e38, -1e38, 1.0], device=device).view(1, 1, 1, 4)
    weights = scaled_masked_softmax(scores, 1.0, causal=False)
    assert weights.flatten().tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, which the interpreter runs on
def test_scores_that_are_no_numbers_show(device):
    scores = torch.ones(1, 1, 3, 3, device=device)
    scores[0, 0, 1, 0] = math.nan
    scores[0, 0, 2, 0] = math.inf
    weights = scaled_masked_softmax(scores, 1.0, causal=True)[0, 0]
    assert weights[0].tolist() == [1.0, 0.0, 0.0]
    assert weights[1, :2].isnan().all()
    assert weights[2].isnan().any()


def test_a_second_backward_is_refused(device):
    leaf = torch.randn(1, 2, 3, 3, device=device, requires_grad=True)
    total = scaled_masked_softmax(leaf.clone(), 1.0, causal=True).square().sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_whoever_needs_the_scores_is_told(device):
    leaf = torch.randn(1, 2, 3, 3, device=device, requires_grad=True)
    scores = leaf.clone()
    squares = scores.square()
    weights = scaled_masked_softmax(scores, 1.0, causal=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squares + weights).sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient(device, mode):
    with mode():
        scores = torch.zeros(1, 1, 2, 2, device=device)
        weights = scaled_masked_softmax(scores, 1.0, causal=True)
        assert weights.flatten().tolist() == [1.0, 0.0, 0.5, 0.5]


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    shape = (5, 8, 1024, 65_536)
    scores = torch.zeros(shape, dtype=torch.float16, device="cuda")
    hidden = torch.ones(5, 1, 1, 65_536, dtype=torch.bool, device="cuda")
    hidden[-1, ..., 4096:8192] = False
    weights = scaled_masked_softmax(scores, 1.0, causal=True, hidden=hidden)
    assert weights[-1, -1, -1, 4096:8192].eq(1 / 4096).all()
    assert weights[-1, -1, -1].sum(dtype=torch.float32) == 1.0
    assert weights[0, 0].eq(0).all()
