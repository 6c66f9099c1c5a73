"""Column- and row-parallel linear layers against the whole matrix, forward and all gradients."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.parallel.collectives import Pending
from lib.parallel.data_parallel import DataParallel, Unit
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.masters import create_masters, fill_shard
from lib.parallel.mesh import build_mesh
from lib.parallel.storage import cuts_of, named_parts
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

S, B, SIZE_IN, SIZE_OUT = 12, 2, 5, 7
CUT = {"q": (12, 2), "k": (24, 1)}  # any of 1 to 4 ranks
FEW = {"q": (12, 2), "k": (1, 3), "v": (2, 3)}  # 1 block, and 2 blocks on 4 ranks
ONE = {"up": (12, 1)}
LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]


def parts_of(name, tensor):
    """FEW without the part that 3 ranks cannot hold."""
    parts = {"cut": CUT, "few": FEW, "one": ONE}[name]
    return {
        part: (blocks, size)
        for part, (blocks, size) in parts.items()
        if blocks % tensor == 0 or tensor % blocks == 0
    }


def column_values(parts, *, bias=True):
    values = {}
    for seed, (name, (blocks, size)) in enumerate(parts.items()):
        values[f"{name}.weight"] = drawn(10 + seed, blocks * size, SIZE_IN)
        if bias:
            values[f"{name}.bias"] = drawn(20 + seed, blocks * size)
    return values


def upstream(part_number, rank, columns):
    return drawn(100 + 10 * part_number + rank, S, B, columns)


def run_column(layer, x, dtype, *, again):
    joined = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    columns = [cut.used_rows for cut in cuts_of(layer.weight).values()]
    outputs, rank = joined.split(columns, dim=-1), layer.groups.tp.rank
    weighted = [
        (output * upstream(number, rank, output.shape[-1]).to(dtype)).sum()
        for number, output in enumerate(outputs)
    ]
    sum(weighted).backward()
    return [output.detach() for output in outputs]


def column_on_rank(parts, sequence, options):
    bias, dtype = options.get("bias", True), options.get("dtype", torch.float64)
    groups = tensor_groups(sequence=sequence)
    layer = ColumnParallelLinear(SIZE_IN, parts, groups, bias=bias)
    fill(layer, column_values(parts, bias=bias), dtype)
    x = cut_sequence(drawn(1, S, B, SIZE_IN), groups).to(dtype).clone().requires_grad_()
    outputs = run_column(layer, x, dtype, again=options.get("again", False))
    return outputs, x.grad, gradients(layer), cuts(layer)


def stored_on_rank(parts, sequence):
    """Through masters, twice: the second time finds what the first one left."""
    mesh = build_mesh("cpu", tensor=dist.get_world_size(), pipeline=1, data=1)
    groups = tensor_groups(sequence=sequence)
    layer = ColumnParallelLinear(SIZE_IN, parts, groups, bias=True)
    held = dict(named_parts(layer))
    masters = create_masters({n: part.cut for n, part in held.items()}, mesh, torch.float64)
    for name, value in column_values(parts).items():
        fill_shard(masters[name], held[name].cut.part_of(value), mesh)
    unit = Unit((layer,), lasts=False)
    engine = DataParallel([[unit]], held, masters, torch.float64, groups, "optimizer")
    for _ in range(2):
        x = cut_sequence(drawn(1, S, B, SIZE_IN), groups).clone().requires_grad_()
        engine.start(trains=True)
        engine.before_backward(0, is_last=True)
        outputs = run_column(layer, x, torch.float64, again=False)
        engine.after_backward(0)
        engine.finish()
    grads = {name: master.grad.full_tensor() for name, master in masters.items()}
    return outputs, x.grad, grads, dict.fromkeys(grads)


@pytest.mark.parametrize("sequence", [False, True])
def test_stored_parameters_get_the_same_gradients(sequence):
    parts = parts_of("few", 4)
    ranks = run_on_ranks(4, stored_on_rank, parts, sequence)
    compare_column(ranks, column_truth(parts, 4), sequence)


def columns_of(rank, tensor, blocks, size):
    """Which columns of a part's output a rank has."""
    if blocks >= tensor:
        share = blocks // tensor * size
        return slice(rank * share, (rank + 1) * share)
    block = rank // (tensor // blocks)
    return slice(block * size, (block + 1) * size)


def column_truth(parts, tensor, *, bias=True):
    x = drawn(1, S, B, SIZE_IN).requires_grad_()
    values = {name: v.requires_grad_() for name, v in column_values(parts, bias=bias).items()}
    loss, outputs = torch.zeros((), dtype=torch.float64), []
    for number, (name, (blocks, size)) in enumerate(parts.items()):
        y = x @ values[f"{name}.weight"].T
        y = y + values[f"{name}.bias"] if bias else y
        mine = [y[..., columns_of(rank, tensor, blocks, size)] for rank in range(tensor)]
        for rank, output in enumerate(mine):
            loss = loss + (output * upstream(number, rank, output.shape[-1])).sum()
        outputs.append([output.detach() for output in mine])
    loss.backward()
    return outputs, x.grad, {name: value.grad for name, value in values.items()}


def compare_column(ranks, truth, sequence, tolerance=1e-12):
    outputs, input_grad, parameter_grads = truth
    for number, expected in enumerate(outputs):
        for rank, output in zip(ranks, expected, strict=True):
            assert_close(rank[0][number], output, tolerance)
    joined = join_activations([rank[1] for rank in ranks], sequence=sequence)
    assert_close(joined, input_grad, tolerance)
    assert set(ranks[0][2]) == set(parameter_grads)
    for name, expected in parameter_grads.items():
        whole = join_parameters([rank[2][name] for rank in ranks], ranks[0][3][name])
        assert_close(whole, expected, tolerance)


@pytest.mark.parametrize(("tensor", "sequence"), LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["cut", "few", "one"])
def test_column_parallel_is_the_whole_map(tensor, sequence, bias, name):
    parts = parts_of(name, tensor)
    ranks = run_on_ranks(tensor, column_on_rank, parts, sequence, {"bias": bias})
    compare_column(ranks, column_truth(parts, tensor, bias=bias), sequence)


def test_fewer_blocks_than_ranks_are_held_whole():
    groups = [ParallelGroups(tp=Group(rank, 4)) for rank in range(4)]
    layers = [ColumnParallelLinear(SIZE_IN, FEW, group, bias=True) for group in groups]
    for layer in layers:
        assert layer.weight.shape == (6 + 3 + 3, SIZE_IN)
        assert layer.bias.shape == (6 + 3 + 3,)
        parts = dict(named_parts(layer))
        rank = layer.groups.tp.rank
        assert parts["q.weight"].cut.dim == 0
        for name, rows, block in (("k", 3, 0), ("v", 6, rank // 2)):
            weight, bias = parts[f"{name}.weight"], parts[f"{name}.bias"]
            assert weight.cut.held_shape == (rows, SIZE_IN)
            assert bias.cut.held_shape == (rows,)
            for part in (weight, bias):  # each rank's queries read one block, and give it a part
                assert part.cut.dim is None
                assert part.cut.used == slice(3 * block, 3 * block + 3)
                assert part.cut.sums_gradient
    with pytest.raises(AssertionError):
        ColumnParallelLinear(SIZE_IN, {"k": (2, 3)}, ParallelGroups(tp=Group(0, 3)), bias=False)
    with pytest.raises(AssertionError):
        ColumnParallelLinear(SIZE_IN, {"k": (6, 3)}, ParallelGroups(tp=Group(0, 4)), bias=False)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_column_in_low_precision(sequence, dtype):
    parts = parts_of("few", 4)
    ranks = run_on_ranks(4, column_on_rank, parts, sequence, {"dtype": dtype})
    assert ranks[0][1].dtype == dtype
    # Inputs, weights and upstream are rounded, sums of at most 4 x 24 products are rounded.
    tolerance = 8 * torch.finfo(dtype).eps
    compare_column(ranks, column_truth(parts, 4), sequence, tolerance)


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputing_a_column_changes_no_bit(sequence):
    parts = parts_of("few", 2)
    stored = run_on_ranks(2, column_on_rank, parts, sequence, {})
    again = run_on_ranks(2, column_on_rank, parts, sequence, {"again": True})
    for first, second in zip(stored, again, strict=True):
        for a, b in zip(first[0], second[0], strict=True):
            assert torch.equal(a, b)
        assert torch.equal(first[1], second[1])
        assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def frozen_on_rank(parts, sequence):
    """Gradients of subsets of the inputs; collectives that each run made."""
    results = []
    names = ["x", "weight", "bias"]
    for wanted in [names, *([name] for name in names), ["x", "bias"], ["weight", "bias"]]:
        calls = []
        groups = tensor_groups(sequence=sequence, watch=lambda call, _, log=calls: log.append(call))
        layer = ColumnParallelLinear(SIZE_IN, parts, groups, bias=True)
        fill(layer, column_values(parts))
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in wanted)
        x = cut_sequence(drawn(1, S, B, SIZE_IN), groups).clone().requires_grad_("x" in wanted)
        run_column(layer, x, torch.float64, again=False)
        results.append((wanted, gradients(layer) | {"x": x.grad}, calls))
    return results


@pytest.mark.parametrize("sequence", [False, True])
def test_only_what_is_asked_for_is_computed(sequence):
    for rank in run_on_ranks(2, frozen_on_rank, CUT, sequence):
        everything = rank[0][1]
        for wanted, found, calls in rank:
            for name, gradient in everything.items():
                if name.rpartition(".")[2] in wanted:
                    assert torch.equal(found[name], gradient)
                else:
                    assert found[name] is None
            if sequence:
                expected = (
                    ["all_gather"]
                    + ["all_gather"] * ("weight" in wanted)
                    + (["reduce_scatter"] * ("x" in wanted))
                )
            else:
                expected = ["all_reduce"] * ("x" in wanted)
            assert calls == expected


class Products(TorchDispatchMode):
    """Notes matrix products by the size of their result."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.log.append(tuple(result.shape))
        return result


def order_on_rank(sequence, is_there):
    log, kept = [], []
    groups = tensor_groups(sequence=sequence)
    groups = replace(groups, tp=replace(groups.tp, watch=lambda call, _: log.append(call)))
    layer = ColumnParallelLinear(SIZE_IN, ONE, groups, bias=True)
    fill(layer, column_values(ONE))
    x = cut_sequence(drawn(1, S, B, SIZE_IN), groups).clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        outputs = layer(x)
    if is_there:
        layer.weight.grad = torch.zeros_like(layer.weight)
    log.clear()

    def waited(pending):
        if pending.work is not None:
            log.append("wait")
            pending.work.wait()
        return pending.tensor

    with patch.object(Pending, "wait", waited), Products(log):
        outputs.backward(torch.ones_like(outputs))
    return log, kept


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_the_gradient_is_on_its_way_while_weight_gradients_are_computed(sequence, is_there):
    input_size, weight_size = (S * B, SIZE_IN), (6, SIZE_IN)
    summed = "reduce_scatter" if sequence else "all_reduce"
    expected = [input_size, summed, weight_size, "wait"]
    if sequence:
        expected = ["all_gather", *expected[:2], "wait", *expected[2:]]
    for log, kept in run_on_ranks(2, order_on_rank, sequence, is_there):
        assert log == expected
        # Of the input only this rank's part is kept; the weight has a place of its own.
        assert [tuple(shape) for shape in kept] == [(6 if sequence else S, B, SIZE_IN)]


def row_on_rank(bias, sequence, dtype=torch.float64):
    groups = tensor_groups(sequence=sequence)
    layer = RowParallelLinear(24, SIZE_OUT, groups, bias=bias)
    fill(layer, row_values(bias), dtype)
    x = drawn(1, S, B, 24).chunk(groups.tp.size, -1)[groups.tp.rank]
    x = x.to(dtype).clone().requires_grad_()
    output = layer(x)
    (output * cut_sequence(drawn(30, S, B, SIZE_OUT), groups).to(dtype)).sum().backward()
    return output.detach(), x.grad, gradients(layer), cuts(layer)


def row_values(bias):
    return {"weight": drawn(10, SIZE_OUT, 24)} | ({"bias": drawn(20, SIZE_OUT)} if bias else {})


@pytest.mark.parametrize(("tensor", "sequence"), LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_is_the_whole_map(tensor, sequence, bias):
    ranks = run_on_ranks(tensor, row_on_rank, bias, sequence)
    x = drawn(1, S, B, 24).requires_grad_()
    values = {name: value.requires_grad_() for name, value in row_values(bias).items()}
    y = F.linear(x, values["weight"], values.get("bias"))
    (y * drawn(30, S, B, SIZE_OUT)).sum().backward()
    assert_close(join_activations([rank[0] for rank in ranks], sequence=sequence), y.detach())
    assert_close(torch.cat([rank[1] for rank in ranks], dim=-1), x.grad)
    assert set(ranks[0][2]) == set(values)
    for name, value in values.items():
        whole = join_parameters([rank[2][name] for rank in ranks], ranks[0][3][name])
        assert_close(whole, value.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_row_in_low_precision(sequence):
    bias = True
    for rank in run_on_ranks(2, row_on_rank, bias, sequence, torch.bfloat16):
        assert rank[0].dtype == rank[1].dtype == rank[2]["bias"].dtype == torch.bfloat16
