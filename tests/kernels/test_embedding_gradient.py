"""Rows of a gradient added to a table's, against float64 sums."""

import pytest
import torch

from kernels import embedding_gradient
from kernels.embedding_gradient import add_rows
from lib.layers.embedding import VocabParallelEmbedding
from lib.layers.fused import runs_kernels
from lib.parallel.groups import Group, ParallelGroups
from tests.kernels.closeness import assert_close, drawn

TILE = embedding_gradient._TILE
VOCABULARY = 700


def repeated(*runs):
    """Token ids, each as often as asked for."""
    ids, counts = zip(*runs, strict=True)
    return torch.tensor(ids).repeat_interleave(torch.tensor(counts))


INDICES = {
    "one": torch.tensor([3]),
    "one skipped": torch.tensor([-1]),
    "none": torch.tensor([], dtype=torch.long),
    "equal": repeated((5, 3 * TILE)),
    "equal, an odd number": repeated((0, 4 * TILE + 1)),
    "distinct": torch.arange(VOCABULARY).flip(0)[: 5 * TILE + 7],
    "a tile each": repeated((0, TILE), (1, TILE), (2, TILE)),
    "across a border": repeated((1, 3), (2, TILE), (4, TILE - 3), (699, 1)),
    "two across neighbouring borders": repeated((1, TILE + 5), (2, TILE), (9, 2 * TILE)),
    "more tiles than are added up at a time": repeated((7, 18 * TILE), (8, 17 * TILE), (9, 1)),
    "as many tiles as are added up at a time": repeated((7, 17 * TILE), (8, 16 * TILE + 3)),
    "all skipped": repeated((-1, 2 * TILE + 3)),
    "most skipped": repeated((-1, 3 * TILE + 2), (4, 1), (6, TILE)),
    "skipped by any negative number": repeated((-7, TILE + 2), (-1, 1), (0, 2)),
}
FREQUENT = torch.tensor([11] * 8 + list(range(92)))  # of 100 positions 8


def shuffled(index, device):
    generator = torch.Generator().manual_seed(index.numel())
    return index[torch.randperm(index.numel(), generator=generator)].to(device)


def exact_sum(total, index, grad):
    kept = index.cpu() >= 0
    return total.double().cpu().index_add_(0, index.cpu()[kept], grad.double().cpu()[kept])


def check(index, columns, dtype, device):
    grad = drawn((index.numel(), columns), dtype, device, seed=1)
    total = drawn((VOCABULARY, columns), torch.float32, device, seed=2)
    expected = exact_sum(total, index, grad)
    before = total.clone()
    again = total.clone()
    add_rows(total, index, grad)
    assert_close(total, expected, torch.float32)
    untouched = torch.ones(VOCABULARY, dtype=torch.bool)
    untouched[index[index >= 0].cpu()] = False
    assert torch.equal(total.cpu()[untouched], before.cpu()[untouched])
    add_rows(again, index, grad)
    assert torch.equal(again, total)


@pytest.mark.parametrize("name", INDICES)
def test_rows_are_added_to_those_they_came_from(name, device):
    check(shuffled(INDICES[name], device), 33, torch.float32, device)


@pytest.mark.parametrize("columns", [1, 8, 512, 1100])
def test_any_number_of_columns(columns, dtype, device):
    check(shuffled(repeated((3, TILE + 9), (4, 1), (-1, 2)), device), columns, dtype, device)


def test_a_frequent_token_among_others(device):
    check(shuffled(FREQUENT.repeat(2), device), 20, torch.float32, device)


def test_indices_of_32_bits(device):
    check(shuffled(INDICES["most skipped"].int(), device), 20, torch.float32, device)


def test_rows_that_occur_are_the_only_ones_read(device):
    index = torch.tensor([4, -1, 4], device=device)
    total = torch.full((6, 5), torch.nan, device=device)
    total[4] = 0.0
    grad = torch.ones(3, 5, device=device)
    grad[1] = torch.nan
    add_rows(total, index, grad)
    assert total[4].eq(2.0).all()
    assert total.isnan().sum() == 25


def exact_gradient(tokens, upstream, group):
    """Of this rank's part of the table, in float64; as many micro batches as upstreams."""
    table = torch.zeros(group.size * VOCABULARY, upstream[0].shape[-1], dtype=torch.float64)
    for one in upstream:
        table.index_add_(0, tokens.flatten().cpu(), one.double().cpu().flatten(0, 1))
    return table[group.rank * VOCABULARY :][:VOCABULARY]


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_layer_adds_to_a_gradient_or_returns_it(rank, has_grad, dtype, device, monkeypatch):
    """Alone, and as one of two ranks whose sum of outputs is left out."""
    monkeypatch.setattr("lib.layers.embedding.leave_tensor_parallel", lambda x, groups: x)
    group = Group() if rank is None else Group(rank, 2)
    layer = VocabParallelEmbedding(VOCABULARY * group.size, 12, ParallelGroups(tp=group))
    values = drawn((VOCABULARY, 12), dtype, device, seed=4)
    layer.weight = weight = torch.nn.Parameter(values)
    weight.grad_dtype = torch.float32
    assert runs_kernels(weight)
    grad = torch.zeros(VOCABULARY, 12, device=device)
    weight.grad = grad if has_grad else None
    tokens = shuffled(FREQUENT * 15 % (VOCABULARY * group.size), device).view(20, 5)
    upstream = drawn((2, 20, 5, 12), dtype, device, seed=5)
    for one in upstream:
        output = layer(tokens)
        output.backward(one)
    assert (weight.grad is grad) == has_grad
    assert weight.grad.dtype == torch.float32
    assert_close(weight.grad, exact_gradient(tokens, upstream, group), torch.float32)
    index = tokens - group.rank * VOCABULARY
    mine = ((index >= 0) & (index < VOCABULARY)).unsqueeze(-1)
    assert torch.equal(output, values[index % VOCABULARY] * mine)


def test_the_layer_keeps_to_a_gradient_of_its_own_type(device):
    layer = VocabParallelEmbedding(VOCABULARY, 3, ParallelGroups())
    layer.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, 3, device=device).half())
    for times in (1, 2):
        layer(torch.tensor([[2, 699, 2]], device=device)).sum().backward()
        assert layer.weight.grad.dtype == torch.float16
        assert layer.weight.grad[2].eq(2 * times).all()
        assert layer.weight.grad.sum() == 9 * times
    plain = VocabParallelEmbedding(VOCABULARY, 3, ParallelGroups(), fused=False)
    plain.weight = layer.weight
    plain(torch.tensor([[1]], device=device)).sum().backward()
    assert layer.weight.grad[1].eq(1).all()


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    total = torch.zeros(44_000, 50_000, device="cuda")
    index = torch.tensor([43_999, 0, 43_999], device="cuda")
    add_rows(total, index, torch.ones(3, 50_000, device="cuda"))
    assert total[-1].eq(2).all()
    assert total[0].eq(1).all()
    assert total[1:-1].eq(0).all()
