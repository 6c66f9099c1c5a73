"""Heads cut and turned in place against torch's form in float64."""

import pytest
import torch
from torch import nn

from kernels import rotary
from lib.layers.rotary import HeadShape, Rotary
from lib.layers.rotary import rotate as rotate_layer
from lib.layers.rotary import split_heads as split_layer
from tests.kernels.closeness import (
    assert_close,
    assert_same_as_exact,
    drawn,
    exact,
    outputs_and_gradients,
)

# S, B, then N, G, D: odd counts, heads shared and not, sizes that are no power of two, and more
# heads than a program takes at a time.
SHAPES = [
    (5, 2, HeadShape(3, 1, 6)),
    (3, 1, HeadShape(4, 4, 8)),
    (2, 3, HeadShape(7, 2, 80)),
    (1, 1, HeadShape(1, 1, 2)),
    (2, 1, HeadShape(5, 3, 1000)),
]
GPU_SHAPES = [(2048, 4, HeadShape(32, 8, 128)), (1023, 3, HeadShape(6, 6, 64))]
TABLES = ["none", "shared", "by sequence"]


def table_of(kind, length, batch, head_dim, device):
    if kind == "none":
        return None
    kept = Rotary(head_dim, 100.0)
    kept.table(length + 3, device)  # a longer one is kept: cosines and sines do not adjoin
    positions = drawn((length, batch), torch.float32, device, seed=9).argsort(0)
    return kept.table(length, device, positions if kind == "by sequence" else None)


def qkv_of(length, batch, shape, dtype, device):
    columns = (shape.num_heads + 2 * shape.num_groups) * shape.head_dim
    return drawn((length, batch, columns), dtype, device, seed=1)


def split(qkv, table, shape):
    return rotary.split_heads(qkv, table, shape.num_heads, shape.num_groups, shape.head_dim)


def fused_split(table, shape):
    """Of a copy, as a leaf is not to be changed."""
    return lambda qkv: split(qkv.clone(), table, shape)


def plain_split(table, shape):
    table = None if table is None else table.cpu()
    return lambda qkv: split_layer(qkv, table, shape, fused=False)


def assert_split_is_exact(length, batch, shape, kind, dtype, device):
    table = table_of(kind, length, batch, shape.head_dim, device)
    upstreams = [
        drawn((length, batch, count, shape.head_dim), dtype, device, seed=seed)
        for seed, count in enumerate((shape.num_heads, shape.num_groups, shape.num_groups))
    ]
    fused, plain = fused_split(table, shape), plain_split(table, shape)
    qkv = qkv_of(length, batch, shape, dtype, device)
    assert_same_as_exact(fused, plain, [qkv], upstreams, dtype)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(("length", "batch", "shape"), SHAPES)
def test_split_heads(length, batch, shape, kind, dtype, device):
    assert_split_is_exact(length, batch, shape, kind, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(("length", "batch", "shape"), GPU_SHAPES)
def test_split_many_heads(length, batch, shape, kind, dtype, device):
    assert_split_is_exact(length, batch, shape, kind, dtype, device)


def test_all_heads_stay_where_they_were(device):
    shape = HeadShape(3, 2, 8)
    qkv = qkv_of(4, 2, shape, torch.float32, device)
    before = qkv.clone()
    parts = split(qkv, table_of("shared", 4, 2, 8, device), shape)
    memory = qkv.unflatten(-1, (-1, 8)).split((3, 2, 2), dim=2)
    for part, place in zip(parts, memory, strict=True):
        assert part.data_ptr() == place.data_ptr()
        assert part.stride() == place.stride()
        assert not part._is_view()
    assert torch.equal(qkv[..., -2 * 8 :], before[..., -2 * 8 :])  # the values
    assert torch.equal(qkv[0], before[0])  # position 0
    assert not torch.equal(qkv[1:], before[1:])


@pytest.mark.parametrize("kind", TABLES)
def test_gradients_may_come_in_any_strides(kind, device):
    shape = HeadShape(3, 2, 6)
    table = table_of(kind, 4, 2, 6, device)
    qkv = qkv_of(4, 2, shape, torch.float32, device)
    upstreams = [
        # As attention hands it over; entries of a head apart; as a sum hands it over.
        drawn((2, 3, 4, 6), torch.float32, device, seed=2).permute(2, 0, 1, 3),
        drawn((4, 2, 6, 2), torch.float32, device, seed=3).transpose(2, 3),
        torch.ones((), device=device).expand(4, 2, 2, 6),
    ]
    *_, found = outputs_and_gradients(fused_split(table, shape), [qkv], upstreams)
    *_, truth = outputs_and_gradients(
        plain_split(table, shape), [exact(qkv)], [exact(dy) for dy in upstreams]
    )
    assert found.is_contiguous()
    assert_close(found, truth, torch.float32)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradients_that_are_not_there_are_zero(used, device):
    shape = HeadShape(3, 2, 6)
    table = table_of("shared", 4, 2, 6, device)
    qkv = qkv_of(4, 2, shape, torch.float32, device)
    upstreams = [None, None, None]
    upstreams[used] = drawn((4, 2, 3 if used == 0 else 2, 6), torch.float32, device, seed=2)
    fused, plain = fused_split(table, shape), plain_split(table, shape)
    assert_same_as_exact(fused, plain, [qkv], upstreams, torch.float32)


@pytest.mark.parametrize("kind", TABLES[1:])
@pytest.mark.parametrize(("length", "batch", "shape"), SHAPES)
def test_rotate(length, batch, shape, kind, dtype, device):
    table = table_of(kind, length, batch, shape.head_dim, device)
    size = (length, batch, shape.num_heads, shape.head_dim)
    x, upstream = drawn(size, dtype, device, seed=1), drawn(size, dtype, device, seed=2)
    kept = upstream.clone()
    assert_same_as_exact(
        lambda x: rotary.rotate(x.clone(), table),
        lambda x: rotate_layer(x, table.cpu(), fused=False),
        [x],
        [upstream],
        dtype,
    )
    assert torch.equal(upstream, kept)


def test_rotate_leaves_what_lies_between_the_heads(device):
    table = table_of("shared", 4, 2, 6, device)
    memory = drawn((4, 2, 5, 9), torch.float32, device, seed=1)
    before = memory.clone()
    inner = (slice(None), slice(None), slice(1, 4), slice(2, 8))
    found = rotary.rotate(memory[inner], table)
    truth = rotate_layer(exact(before[inner]), table.cpu(), fused=False)
    assert_close(found, truth, torch.float32)
    assert found.data_ptr() == memory[inner].data_ptr()
    memory[inner] = before[inner]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context, device):
    shape = HeadShape(3, 1, 8)
    table = table_of("shared", 4, 2, 8, device)
    qkv = qkv_of(4, 2, shape, torch.float32, device).requires_grad_()
    truth = plain_split(table, shape)(exact(qkv))
    with context():
        found = split(qkv.clone(), table, shape)
        again = rotary.rotate(found[0].clone(), table)
    for one, expected in zip(found, truth, strict=True):
        assert not one.requires_grad
        assert_close(one, expected, torch.float32)
    assert_close(again, rotate_layer(truth[0], table.cpu(), fused=False), torch.float32)


def test_a_producer_that_needs_its_output_is_told(device):
    """Softmax keeps what it returns: in its backward the turned heads would pass for it."""
    shape = HeadShape(2, 1, 4)
    table = table_of("shared", 3, 1, 4, device)
    leaf = qkv_of(3, 1, shape, torch.float32, device).requires_grad_()
    q, k, v = split(leaf.softmax(-1), table, shape)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q.sum() + k.sum() + v.sum()).backward()
    x = drawn((3, 1, 2, 4), torch.float32, device, seed=1).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotary.rotate(x.softmax(-1), table).sum().backward()


def test_turning_after_head_norms(device):
    """Cut, normalise each head, turn: the other way through a layer."""
    shape = HeadShape(3, 2, 8)
    table = table_of("by sequence", 4, 2, 8, device)
    qkv = qkv_of(4, 2, shape, torch.float32, device)
    upstreams = [drawn((4, 2, count, 8), torch.float32, device, seed=count) for count in (3, 2, 2)]

    def through(qkv, *, fused):
        angles = table.to(qkv.device)
        q, k, v = split_layer(qkv, None, shape, fused=fused)
        q, k = (nn.functional.rms_norm(x, (8,), eps=1e-6) for x in (q, k))
        return *(rotate_layer(x, angles, fused=fused) for x in (q, k)), v

    assert_same_as_exact(
        lambda x: through(x.clone(), fused=True),
        lambda x: through(x, fused=False),
        [qkv],
        upstreams,
        torch.float32,
    )


def test_layers_take_the_kernel_where_it_runs(device):
    shape = HeadShape(2, 1, 4)
    table = table_of("shared", 3, 1, 4, device)
    for dtype, fused, in_place in (
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.float64, True, False),
    ):
        qkv = torch.randn(3, 1, 16, device=device, dtype=dtype)
        before = qkv.clone()
        q, _, _ = split_layer(qkv, table, shape, fused=fused)
        assert (q.data_ptr() == qkv.data_ptr()) == in_place
        assert torch.equal(qkv, before) != in_place
        turned = rotate_layer(q, table, fused=fused)
        assert (turned.data_ptr() == q.data_ptr()) == in_place
