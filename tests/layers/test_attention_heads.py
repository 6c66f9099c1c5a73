"""Attention over cut and shared heads against plain heads: projections, norms, positions, core."""

import pytest
import torch
from torch import nn

from lib.layers.attention_backends import sdpa_attention
from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.layers.norm import HeadNorm
from lib.layers.rotary import HeadShape, Rotary, rotate, split_heads
from tests.distributed import run_on_ranks
from tests.layers.on_ranks import (
    assert_close,
    cut_sequence,
    cuts,
    drawn,
    fill,
    gradients,
    join_activations,
    join_parameters,
    tensor_groups,
)
from tests.reference import plain_attention, plain_linear, plain_rotary

S, B, H, D = 12, 2, 10, 4
EPSILON, THETA = 1e-5, 100.0
# tensor, query heads, key/value heads: cut, one a rank, shared by 2 and by 4, one query head a rank
HEADS = [(2, 4, 2), (2, 4, 1), (3, 6, 1), (4, 8, 4), (4, 8, 2), (4, 8, 1), (4, 4, 2), (4, 4, 1)]


class Attention(nn.Module):
    def __init__(self, heads, kv_heads, groups):
        super().__init__()
        parts = {"q": (heads, D), "k": (kv_heads, D), "v": (kv_heads, D)}
        self.qkv = ColumnParallelLinear(H, parts, groups, bias=True)
        ranks = groups.tp.size
        self.shape = HeadShape(heads // ranks, max(1, kv_heads // ranks), D)
        self.q_norm = HeadNorm(D, EPSILON, groups)
        self.k_norm = HeadNorm(D, EPSILON, groups)
        self.rotary = Rotary(D, THETA)
        self.proj = RowParallelLinear(heads * D, H, groups, bias=True)

    def forward(self, x_SBH):
        q, k, v = split_heads(self.qkv(x_SBH), None, self.shape, fused=False)
        table = self.rotary.table(S, x_SBH.device)
        q, k = (rotate(x, table, fused=False) for x in (self.q_norm(q), self.k_norm(k)))
        return self.proj(sdpa_attention(q, k, v, 0.0))


def values_of(heads, kv_heads):
    values = {"proj.weight": drawn(1, H, heads * D), "proj.bias": drawn(2, H)}
    for seed, (name, count) in enumerate((("q", heads), ("k", kv_heads), ("v", kv_heads))):
        values[f"qkv.{name}.weight"] = drawn(10 + seed, count * D, H)
        values[f"qkv.{name}.bias"] = drawn(20 + seed, count * D)
    return values | {"q_norm.weight": drawn(3, D), "k_norm.weight": drawn(4, D)}


def attend_on_rank(heads, kv_heads, sequence):
    groups = tensor_groups(sequence=sequence)
    layer = Attention(heads, kv_heads, groups)
    fill(layer, values_of(heads, kv_heads))
    x = cut_sequence(drawn(5, S, B, H), groups).clone().requires_grad_()
    output = layer(x)
    (output * cut_sequence(drawn(6, S, B, H), groups)).sum().backward()
    return output.detach(), x.grad, gradients(layer), cuts(layer)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def truth(heads, kv_heads):
    """Head by head, batch first."""
    values = {name: v.requires_grad_() for name, v in values_of(heads, kv_heads).items()}
    x_SBH = drawn(5, S, B, H).requires_grad_()
    q, k, v = (plain_linear(x_SBH.transpose(0, 1), values, f"qkv.{part}") for part in "qkv")
    outputs = []
    for head in range(heads):
        mine, shared = (n * D for n in (head, head // (heads // kv_heads)))
        query = rms_norm(q[..., mine : mine + D], values["q_norm.weight"])
        key = rms_norm(k[..., shared : shared + D], values["k_norm.weight"])
        query, key = plain_rotary(query, THETA), plain_rotary(key, THETA)
        outputs.append(plain_attention(query, key, v[..., shared : shared + D]))
    y_SBH = plain_linear(torch.cat(outputs, dim=-1), values, "proj").transpose(0, 1)
    (y_SBH * drawn(6, S, B, H)).sum().backward()
    return y_SBH.detach(), x_SBH.grad, {name: value.grad for name, value in values.items()}


@pytest.mark.parametrize(("tensor", "heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("sequence", [False, True])
def test_heads_on_several_ranks_are_the_heads_of_one(tensor, heads, kv_heads, sequence):
    ranks = run_on_ranks(tensor, attend_on_rank, heads, kv_heads, sequence)
    output, input_grad, parameter_grads = truth(heads, kv_heads)
    assert_close(join_activations([rank[0] for rank in ranks], sequence=sequence), output)
    assert_close(join_activations([rank[1] for rank in ranks], sequence=sequence), input_grad)
    assert set(ranks[0][2]) == set(parameter_grads)
    for name, expected in parameter_grads.items():
        found = join_parameters([rank[2][name] for rank in ranks], ranks[0][3][name])
        assert_close(found, expected)
