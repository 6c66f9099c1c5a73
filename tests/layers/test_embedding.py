"""Vocabulary-parallel embedding and output layer against whole tables; positions."""

import pytest
import torch
import torch.distributed as dist

from lib.layers.embedding import OutputLayer, PositionEmbedding, VocabParallelEmbedding
from lib.parallel.groups import Group
from lib.parallel.storage import cut_of
from tests.distributed import run_on_ranks
from tests.reference import FLOAT64

# Every row, some twice, so that each rank's slice has its first and last id looked up.
TOKENS = torch.tensor([[0, 15, 3], [4, 7, 8], [11, 12, 0], [5, 5, 2]])


def whole_group():
    size = dist.get_world_size()
    return Group(dist.get_rank(), size, dist.group.WORLD if size > 1 else None)


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embed_on_rank():
    layer = VocabParallelEmbedding(16, 6, whole_group())
    layer.weight.data = cut_of(layer.weight).part_of(drawn(1, 16, 6)).clone()
    output = layer(TOKENS)
    (output * drawn(2, *TOKENS.shape, 6)).sum().backward()
    return output.detach(), layer.weight.grad


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_embedding_is_a_look_up_in_the_whole_table(tensor):
    ranks = run_on_ranks(tensor, embed_on_rank)
    table = drawn(1, 16, 6).requires_grad_()
    expected = table[TOKENS]
    (expected * drawn(2, *TOKENS.shape, 6)).sum().backward()
    for output, _ in ranks:
        assert torch.equal(output, expected.detach())
    gathered = torch.cat([gradient for _, gradient in ranks])
    torch.testing.assert_close(gathered, table.grad, **FLOAT64)


def project_on_rank(tied):
    group = whole_group()
    layer = OutputLayer(16, 6, group, own_weight=not tied)
    table = VocabParallelEmbedding(16, 6, group).weight
    table.data = cut_of(table).part_of(drawn(1, 16, 6)).clone()
    if not tied:
        layer.weight.data = cut_of(layer.weight).part_of(drawn(3, 16, 6)).clone()
    x = drawn(4, 3, 2, 6).requires_grad_()
    logits = layer(x, table if tied else None)
    (logits * drawn(5, 3, 2, 16).chunk(group.size, -1)[group.rank]).sum().backward()
    weight = table if tied else layer.weight
    return logits.detach(), x.grad, weight.grad, [name for name, _ in layer.named_parameters()]


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_output_layer_gives_slices_of_the_logits(tensor, tied):
    ranks = run_on_ranks(tensor, project_on_rank, tied)
    x = drawn(4, 3, 2, 6).requires_grad_()
    table = drawn(1 if tied else 3, 16, 6).requires_grad_()
    logits = x @ table.T
    (logits * drawn(5, 3, 2, 16)).sum().backward()
    gathered = torch.cat([rank[0] for rank in ranks], dim=-1)
    torch.testing.assert_close(gathered, logits.detach(), **FLOAT64)
    for rank in ranks:
        torch.testing.assert_close(rank[1], x.grad, **FLOAT64)
        assert rank[3] == ([] if tied else ["weight"])
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), table.grad, **FLOAT64)


def test_positions_are_the_first_rows():
    layer = PositionEmbedding(7, 4, Group())
    layer.weight.data = drawn(1, 7, 4)
    output = layer(5)
    assert output.shape == (5, 1, 4)
    assert torch.equal(output.squeeze(1), layer.weight[:5])
    output.sum().backward()
    assert layer.weight.grad[:5].eq(1).all()
    assert layer.weight.grad[5:].eq(0).all()
