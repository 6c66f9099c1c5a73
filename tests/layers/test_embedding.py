"""Vocabulary-parallel embedding, positions and output layer against whole tables."""

import pytest
import torch

from lib.layers.embedding import OutputLayer, PositionEmbedding, VocabParallelEmbedding
from lib.parallel.groups import ParallelGroups
from tests.distributed import run_on_ranks
from tests.layers.on_ranks import (
    assert_close,
    cut_sequence,
    drawn,
    fill,
    gradients,
    join_activations,
    join_parameters,
    tensor_groups,
)

V, H = 24, 6
# Every row's ends, some ids twice, so that each rank's slice has its first and last id looked up.
TOKENS = torch.tensor([[0, 23, 3], [5, 6, 7], [8, 11, 12], [5, 5, 2], [15, 16, 17], [18, 0, 23]])
TOKENS = torch.cat((TOKENS, TOKENS.flip(0)))  # 12 positions: 2, 3 and 4 ranks divide them
LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]


def embed_on_rank(sequence):
    groups = tensor_groups(sequence=sequence)
    layer = VocabParallelEmbedding(V, H, groups)
    fill(layer, {"weight": drawn(1, V, H)})
    output = layer(TOKENS)
    (output * cut_sequence(drawn(2, *TOKENS.shape, H), groups)).sum().backward()
    return output.detach(), layer.weight.grad


@pytest.mark.parametrize(("tensor", "sequence"), LAYOUTS)
def test_embedding_is_a_look_up_in_the_whole_table(tensor, sequence):
    ranks = run_on_ranks(tensor, embed_on_rank, sequence)
    table = drawn(1, V, H).requires_grad_()
    expected = table[TOKENS]
    (expected * drawn(2, *TOKENS.shape, H)).sum().backward()
    joined = join_activations([output for output, _ in ranks], sequence=sequence)
    assert torch.equal(joined, expected.detach())  # one number and zeros add up exactly
    assert_close(torch.cat([gradient for _, gradient in ranks]), table.grad)


def embed_micro_batches_on_rank(sequence, upstream):
    groups = tensor_groups(sequence=sequence)
    layer = VocabParallelEmbedding(V, H, groups)
    fill(layer, {"weight": drawn(1, V, H)}, torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = total = torch.full(layer.weight.shape, 1000.0)
    for one in upstream:
        layer(TOKENS).backward(cut_sequence(one, groups))
    assert layer.weight.grad is total
    return total


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True)])
def test_micro_batches_add_up_in_a_gradient_that_is_there(tensor, sequence):
    """In its own precision: of bf16, 1000 and 1 is 1000. Whole numbers add up exactly."""
    upstream = drawn(2, 2, *TOKENS.shape, H).mul(3).round()
    ranks = run_on_ranks(tensor, embed_micro_batches_on_rank, sequence, upstream.bfloat16())
    expected = torch.full((V, H), 1000.0, dtype=torch.float64)
    expected.index_add_(0, TOKENS.flatten().repeat(2), upstream.view(-1, H))
    assert torch.equal(torch.cat(ranks).double(), expected)


OWN_POSITIONS = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 2, 1]]).repeat(4, 1)


def positions_on_rank(sequence):
    groups = tensor_groups(sequence=sequence)
    results = []
    for positions_SB in (None, OWN_POSITIONS):
        layer = PositionEmbedding(15, H, groups)
        fill(layer, {"weight": drawn(1, 15, H)})
        output = layer(12, positions_SB)
        (output * cut_sequence(drawn(2, 12, 3, H), groups)).sum().backward()
        results.append((output.detach(), gradients(layer)["weight"]))
    return results


@pytest.mark.parametrize(("tensor", "sequence"), LAYOUTS)
def test_positions_are_the_first_rows_or_those_asked_for(tensor, sequence):
    ranks = run_on_ranks(tensor, positions_on_rank, sequence)
    for case, positions_SB in enumerate((torch.arange(12)[:, None], OWN_POSITIONS)):
        joined = join_activations([rank[case][0] for rank in ranks], sequence=sequence)
        table = drawn(1, 15, H).requires_grad_()
        expected = table[positions_SB]
        assert torch.equal(joined, expected.detach())
        (expected * drawn(2, 12, 3, H)).sum().backward()
        gradient = join_parameters([rank[case][1] for rank in ranks], None)
        assert_close(gradient, table.grad)
        assert gradient[12:].eq(0).all()


def project_on_rank(tied, sequence):
    groups = tensor_groups(sequence=sequence)
    layer = OutputLayer(V, H, groups, own_weight=not tied)
    table = VocabParallelEmbedding(V, H, groups)
    fill(table, {"weight": drawn(1, V, H)})
    fill(layer, {} if tied else {"weight": drawn(3, V, H)})
    x = cut_sequence(drawn(4, 12, 2, H), groups).clone().requires_grad_()
    logits = layer(x, table.weight if tied else None)
    upstream = drawn(5, 12, 2, V).chunk(groups.tp.size, -1)[groups.tp.rank]
    (logits * upstream).sum().backward()
    weight = table.weight if tied else layer.weight
    return logits.detach(), x.grad, weight.grad


@pytest.mark.parametrize(("tensor", "sequence"), LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_output_layer_gives_slices_of_the_logits(tensor, sequence, tied):
    ranks = run_on_ranks(tensor, project_on_rank, tied, sequence)
    x = drawn(4, 12, 2, H).requires_grad_()
    table = drawn(1 if tied else 3, V, H).requires_grad_()
    logits = x @ table.T
    (logits * drawn(5, 12, 2, V)).sum().backward()
    assert_close(torch.cat([rank[0] for rank in ranks], dim=-1), logits.detach())
    assert_close(join_activations([rank[1] for rank in ranks], sequence=sequence), x.grad)
    assert_close(torch.cat([rank[2] for rank in ranks]), table.grad)


def test_a_tied_output_layer_has_no_weight():
    assert not list(OutputLayer(V, H, ParallelGroups(), own_weight=False).parameters())
    assert len(list(OutputLayer(V, H, ParallelGroups(), own_weight=True).parameters())) == 1
