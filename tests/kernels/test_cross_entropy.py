"""The two passes over logits, and the loss made of them, against float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from kernels.cross_entropy import row_statistics, write_gradient
from lib.layers.cross_entropy import vocab_parallel_cross_entropy
from lib.layers.fused import runs_kernels
from lib.parallel.groups import Group
from tests.kernels.closeness import assert_close, drawn

ROWS = 5
EPS = torch.finfo(torch.float32).eps
# Columns, global id of the first one, real columns. Blocks have 4096 columns.
SLICES = [
    (77, 0, 77),
    (77, 154, 50),
    (64, 128, 0),
    (1, 3, 1),
    (4096, 0, 4096),
    (5001, 5001, 4999),
    (9000, 0, 4096),
]
PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0}
TERMS = [
    PLAIN,
    {"label_smoothing": 0.1, "z_loss": 0.0},
    {"label_smoothing": 0.3, "z_loss": 1e-2},
    {"label_smoothing": 1.0, "z_loss": 1.0},
]


def drawn_logits(columns, real, dtype, device):
    logits = 3.0 * drawn((ROWS, columns), dtype, device, seed=columns)
    logits[:, real:] = math.nan  # padding, never to be seen
    return logits


def drawn_labels(first, real, device):
    """The first and the last real column, one between, and two of other ranks."""
    inside = [first, first + real - 1, first + real // 2] if real else [0, 1, 2]
    return torch.tensor([*inside, first - 1, first + 10**6], device=device)


@pytest.mark.parametrize(("columns", "first", "real"), SLICES)
def test_statistics_of_rows(columns, first, real, dtype, device):
    logits = drawn_logits(columns, real, dtype, device)
    labels = drawn_labels(first, real, device)
    before = logits.clone()
    maximum, total, label, plain = row_statistics(logits, labels, first, real).cpu()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    exact = logits[:, :real].double().cpu()
    if real:
        assert torch.equal(maximum.double(), exact.amax(1))
    else:
        assert maximum.eq(-math.inf).all()
    sums = (exact - maximum.unsqueeze(1)).exp().sum(1)
    assert_close(total, sums, torch.float32)
    rounding = EPS * exact.abs().sum(1).max().item() if real else 0.0
    torch.testing.assert_close(plain.double(), exact.sum(1), rtol=0, atol=8 * rounding)
    places = (labels - first).tolist()
    taken = [exact[i, j].item() if 0 <= j < real else 0.0 for i, j in enumerate(places)]
    assert label.tolist() == taken


def test_rows_of_minus_infinity_have_no_exponentials(device):
    logits = torch.full((2, 5000), -math.inf, device=device)
    logits[1, 4999] = 1.0
    labels = torch.tensor([7, 4999], device=device)
    statistics = row_statistics(logits, labels, 0, 5000)[:3].tolist()
    assert statistics == [[-math.inf, 1.0], [0.0, 1.0], [-math.inf, 1.0]]


@pytest.mark.parametrize(("columns", "first", "real"), SLICES)
def test_gradient_lies_where_the_logits_were(columns, first, real, dtype, device):
    logits = drawn_logits(columns, real, dtype, device)
    labels = drawn_labels(first, real, device)
    exact = logits.double().cpu()
    maximum = torch.full((1, ROWS), exact[:, :real].max().item() if real else 0.0)
    weights = torch.cat((maximum, drawn((3, ROWS), torch.float32, "cpu", seed=3)))
    write_gradient(logits, labels, first, real, weights.to(device))
    maximum, factor, label_weight, uniform_weight = weights.double().unsqueeze(2)
    hit = torch.arange(first, first + columns) == labels.cpu().unsqueeze(1)
    gradient = factor * (exact - maximum).exp() - label_weight * hit - uniform_weight
    gradient[:, real:] = 0.0
    assert_close(logits, gradient, dtype)
    assert logits[:, real:].eq(0).all()


def loss_and_gradient(logits, labels, vocab_size, terms):
    """In float64, of the sum of losses weighted 1, -2, 3 and so on."""
    whole, labels = logits.double().cpu().requires_grad_(), labels.cpu()
    real = whole[..., :vocab_size]
    losses = F.cross_entropy(
        real.flatten(0, 1),
        labels.flatten(),
        reduction="none",
        label_smoothing=terms["label_smoothing"],
    ).view_as(labels)
    losses = losses + terms["z_loss"] * real.logsumexp(-1).square()
    weighted(losses).backward()
    return losses.detach(), whole.grad


def weighted(losses):
    count = torch.arange(1.0, losses.numel() + 1, dtype=losses.dtype, device=losses.device)
    return (losses * (count * (-1) ** (count + 1)).view_as(losses)).sum()


@pytest.mark.parametrize(("padded", "vocab_size"), [(77, 70), (4224, 4200)])
@pytest.mark.parametrize("terms", TERMS)
def test_loss_and_gradient(terms, padded, vocab_size, dtype, device):
    logits = drawn_logits(padded, vocab_size, dtype, device).unsqueeze(1)
    labels = torch.tensor([[0], [vocab_size - 1], [5], [5], [9]], device=device)
    assert runs_kernels(logits)
    leaf = logits.clone().requires_grad_()
    handed = leaf.clone()
    losses = vocab_parallel_cross_entropy(handed, labels, vocab_size, Group(), **terms)
    assert losses.dtype == torch.float32
    weighted(losses).backward()
    expected, gradient = loss_and_gradient(logits, labels, vocab_size, terms)
    assert_close(losses.detach(), expected, torch.float32)
    assert leaf.grad.dtype == dtype
    assert leaf.grad.data_ptr() == handed.data_ptr()
    assert_close(leaf.grad, gradient, dtype)
    assert leaf.grad[..., vocab_size:].eq(0).all()


def test_large_logits_lose_nothing(device):
    """Logits of 10^4 have steps of 10^-3 in fp32; their differences are exact."""
    logits = torch.tensor([[[1e4, 1e4 - 1.0, 1e4 - 3.0, -1e4]]], device=device)
    leaf = logits.clone().requires_grad_()
    labels = torch.tensor([[1]], device=device)
    losses = vocab_parallel_cross_entropy(leaf.clone(), labels, 4, Group())
    losses.sum().backward()
    expected, gradient = loss_and_gradient(logits, labels, 4, PLAIN)
    assert_close(losses.detach(), expected, torch.float32)
    assert_close(leaf.grad, gradient, torch.float32)


def test_a_second_backward_is_refused(device):
    logits = torch.randn(2, 2, 9, device=device, requires_grad=True)
    labels = torch.zeros(2, 2, dtype=torch.long, device=device)
    loss = vocab_parallel_cross_entropy(logits.clone(), labels, 9, Group()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_logits_stay(device, mode):
    with mode():
        logits = torch.randn(2, 2, 9, device=device)
        before = logits.clone()
        labels = torch.zeros(2, 2, dtype=torch.long, device=device)
        vocab_parallel_cross_entropy(logits, labels, 9, Group())
        assert torch.equal(logits, before)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    rows, columns = 43_000, 50_304
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    logits[-1, -1] = 2.0
    labels = torch.full((rows,), columns - 1, device="cuda")
    statistics = row_statistics(logits, labels, 0, columns)
    assert statistics[0, -1] == 2.0
    assert statistics[2, -1] == 2.0
    weights = torch.zeros(4, rows, device="cuda")
    weights[2] = 1.0
    write_gradient(logits, labels, 0, columns, weights)
    assert logits[:, -1].eq(-1).all()
    assert logits[-1, :-1].eq(0).all()
