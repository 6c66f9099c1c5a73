"""Vocabulary-parallel cross entropy against torch's, over whole logits without padding."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lib.layers import cross_entropy
from lib.layers.cross_entropy import vocab_parallel_cross_entropy
from lib.parallel.groups import Group
from tests.distributed import run_on_ranks
from tests.reference import FLOAT64

_PADDED = 32
# With 4 ranks of 8 columns: no padding; inside the last slice; exactly the last slice; inside the
# third (the last is all padding); three ranks all padding; one real column more than a slice.
_VOCABULARIES = (32, 27, 24, 20, 8, 3, 9)
_PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0}
_TERMS = [
    {"label_smoothing": 0.1, "z_loss": 0.0},
    {"label_smoothing": 0.0, "z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3},
    {"label_smoothing": 1.0, "z_loss": 1.0},
]


def drawn_logits(seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 3, _PADDED, generator=generator, dtype=torch.float64)


def drawn_labels(vocab_size):
    labels = torch.randint(vocab_size, (4, 3), generator=torch.Generator().manual_seed(vocab_size))
    labels[0, 0], labels[0, 1] = 0, vocab_size - 1
    return labels


def drawn_weights():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def losses_on_rank(cases, terms=_PLAIN):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(rank, size, dist.group.WORLD if size > 1 else None)
    results = []
    for logits, vocab_size in cases:
        mine = logits.chunk(size, -1)[rank].clone().requires_grad_()
        handed, labels = mine.clone(), drawn_labels(vocab_size)
        losses = vocab_parallel_cross_entropy(handed, labels, vocab_size, group, **terms)
        (losses * drawn_weights().to(losses.dtype)).sum().backward()
        results.append((losses.detach(), mine.grad, handed.detach()))
    return results


def truth(logits, vocab_size, terms=_PLAIN):
    """Loss and gradient in float64; the gradient of padding columns is zero."""
    whole = logits.double().requires_grad_()
    real = whole[..., :vocab_size]
    losses = F.cross_entropy(
        real.reshape(-1, vocab_size),
        drawn_labels(vocab_size).reshape(-1),
        reduction="none",
        label_smoothing=terms["label_smoothing"],
    ).view(4, 3)
    losses = losses + terms["z_loss"] * real.logsumexp(-1).square()
    (losses * drawn_weights()).sum().backward()
    return losses.detach(), whole.grad


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("terms", [_PLAIN, *_TERMS])
def test_equals_torch_wherever_the_padding_ends(tensor, terms):
    """Faults: smoothing over the local or the padded vocabulary; losses too high by log T."""
    cases = [(drawn_logits(n), vocab_size) for n, vocab_size in enumerate(_VOCABULARIES)]
    ranks = run_on_ranks(tensor, losses_on_rank, cases, terms)
    for number, (logits, vocab_size) in enumerate(cases):
        losses, gradient = truth(logits, vocab_size, terms)
        for rank in ranks:
            torch.testing.assert_close(rank[number][0], losses, **FLOAT64)
        gathered = torch.cat([rank[number][1] for rank in ranks], dim=-1)
        torch.testing.assert_close(gathered, gradient, **FLOAT64)
        assert gathered[..., vocab_size:].eq(0).all()
        handed = torch.cat([rank[number][2] for rank in ranks], dim=-1)
        assert torch.equal(handed, gathered)  # no other memory is used for it


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("terms", [_PLAIN, *_TERMS])
def test_padding_logits_are_never_seen(tensor, terms):
    """Whatever stands there, even infinities and the largest logit of all."""
    clean = drawn_logits(1)
    dirty = clean.clone()
    dirty[..., 20:] = 1e4
    dirty[..., 31] = math.inf
    dirty[..., 30] = math.nan
    ranks = run_on_ranks(tensor, losses_on_rank, [(clean, 20), (dirty, 20)], terms)
    for first, second in ranks:
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("terms", [_PLAIN, *_TERMS])
def test_large_logits_do_not_overflow(tensor, terms):
    logits = drawn_logits(2, scale=1e4)
    for rank in run_on_ranks(tensor, losses_on_rank, [(logits, 27)], terms):
        torch.testing.assert_close(rank[0][0], truth(logits, 27, terms)[0], **FLOAT64)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [_PLAIN, _TERMS[0]])
def test_losses_are_computed_in_fp32(tensor, dtype, terms):
    logits = drawn_logits(3).to(dtype)
    ranks = run_on_ranks(tensor, losses_on_rank, [(logits, 27)], terms)
    losses, gradient = truth(logits, 27, terms)
    eps = torch.finfo(torch.float32).eps
    for rank in ranks:
        assert rank[0][0].dtype == torch.float32
        # Rounding of a logit of size 10 and of a sum of 27 terms.
        torch.testing.assert_close(rank[0][0].double(), losses, rtol=0, atol=30 * eps)
        assert rank[0][1].dtype == dtype
    gathered = torch.cat([rank[0][1] for rank in ranks], dim=-1).double()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(gathered, gradient, rtol=rounding, atol=30 * eps)


def test_one_real_token_costs_nothing():
    losses = vocab_parallel_cross_entropy(
        torch.randn(2, 2, 8), torch.zeros(2, 2, dtype=torch.long), 1, Group()
    )
    assert losses.eq(0).all()


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    losses = vocab_parallel_cross_entropy(
        torch.zeros(2, 2, 256), torch.full((2, 2), 9), 200, Group()
    )
    torch.testing.assert_close(losses, torch.full((2, 2), math.log(200)))


@pytest.mark.parametrize("vocab_size", [5, 8])
@pytest.mark.parametrize("terms", [_PLAIN, *_TERMS])
def test_gradient_by_differences(vocab_size, terms):
    logits = torch.randn(2, 2, 8, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([[0, 4], [2, 3]]), drawn_weights()[:2, :2]

    def total(x):
        return (
            vocab_parallel_cross_entropy(x, labels, vocab_size, Group(), **terms) * weights
        ).sum()

    (gradient,) = torch.autograd.grad(total(logits.clone()), logits)
    steps = 1e-5 * torch.eye(32, dtype=torch.float64).view(32, 2, 2, 8)
    with torch.no_grad():
        slopes = torch.stack([(total(logits + d) - total(logits - d)) / 2e-5 for d in steps])
    torch.testing.assert_close(gradient, slopes.view(2, 2, 8), rtol=1e-6, atol=1e-8)


def test_a_weight_of_zero_gives_no_gradient():
    logits = torch.randn(2, 2, 8, requires_grad=True)
    labels = torch.zeros(2, 2, dtype=torch.long)
    losses = vocab_parallel_cross_entropy(logits.clone(), labels, 8, Group())
    (losses * torch.tensor([[1.0, 0.0], [0.0, 1.0]])).sum().backward()
    assert logits.grad[0, 1].eq(0).all()
    assert logits.grad[1, 0].eq(0).all()
    assert logits.grad[0, 0].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_logits_are_all_that_is_kept(dtype):
    kept = []
    leaf = torch.randn(2, 2, 64, dtype=dtype, requires_grad=True)
    logits = leaf.clone()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        losses = vocab_parallel_cross_entropy(
            logits, torch.ones(2, 2).long(), 60, Group(), label_smoothing=0.1, z_loss=0.1
        )
    large = [t for t in kept if t.numel() > 4]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
    losses.sum().backward()
    assert leaf.grad.data_ptr() == logits.data_ptr()


def test_a_second_backward_is_refused():
    logits = torch.randn(2, 2, 8, requires_grad=True)
    labels = torch.zeros(2, 2, dtype=torch.long)
    loss = vocab_parallel_cross_entropy(logits.clone(), labels, 8, Group()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_gradient_logits_stay():
    logits, labels = drawn_logits(5), drawn_labels(20)
    before = logits.clone()
    with torch.no_grad():
        vocab_parallel_cross_entropy(logits, labels, 20, Group(), label_smoothing=0.1, z_loss=0.1)
    assert torch.equal(logits, before)


def test_logits_that_are_not_contiguous():
    leaf = drawn_logits(6).requires_grad_()
    turned = leaf.transpose(0, 1).contiguous().transpose(0, 1)
    labels = drawn_labels(27).T.contiguous().T
    losses = vocab_parallel_cross_entropy(turned, labels, 27, Group())
    (losses * drawn_weights()).sum().backward()
    expected, gradient = truth(leaf.detach(), 27)
    torch.testing.assert_close(losses.detach(), expected, **FLOAT64)
    torch.testing.assert_close(leaf.grad, gradient, **FLOAT64)


@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13])
@pytest.mark.parametrize("terms", [_PLAIN, _TERMS[2]])
def test_any_number_of_rows_at_once(monkeypatch, rows, terms):
    monkeypatch.setattr(cross_entropy, "_CHUNK", rows * _PADDED)
    test_equals_torch_wherever_the_padding_ends(1, terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_in_fp32(monkeypatch, dtype):
    """No operation takes more new memory than two chunks; a copy would be 64."""
    monkeypatch.setattr(cross_entropy, "_CHUNK", 4 * 512)
    leaf = torch.randn(128, 2, 512, dtype=dtype, requires_grad=True)
    logits, labels = leaf.clone(), torch.ones(128, 2, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        vocab_parallel_cross_entropy(
            logits, labels, 500, Group(), label_smoothing=0.1, z_loss=0.1
        ).sum().backward()
    taken = max(event.self_cpu_memory_usage for event in record.events())
    assert 0 < taken <= 2 * (4 * 512 * 4)


def reductions_on_rank(terms):
    rank, size = dist.get_rank(), dist.get_world_size()
    told = []
    group = Group(rank, size, dist.group.WORLD, watch=lambda call, x: told.append((call, x.shape)))
    logits = drawn_logits(4).chunk(size, -1)[rank].clone().requires_grad_()
    labels = drawn_labels(27)
    vocab_parallel_cross_entropy(logits, labels, 27, group, **terms).sum().backward()
    return told


@pytest.mark.parametrize(("terms", "sums"), [(_PLAIN, 2), (_TERMS[1], 2), (_TERMS[0], 3)])
def test_two_reductions(terms, sums):
    expected = [("all_reduce", (12,)), ("all_reduce", (sums, 12))]
    assert run_on_ranks(2, reductions_on_rank, terms) == [expected, expected]
