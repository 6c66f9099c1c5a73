"""Collectives against sums and joins of all ranks' tensors; the conjugate pairs; debug watch."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lib.parallel import collectives
from lib.parallel.collectives import (
    all_reduce,
    exchange_parts,
    gather_first_dim,
    leave_tensor_parallel,
    reduce_from_group,
    reduce_scatter_first_dim,
    reduce_scatter_to_sequence,
    start_all_reduce,
    start_gather_first_dim,
    start_reduce_scatter_first_dim,
)
from lib.parallel.groups import Group, ParallelGroups
from tests.distributed import run_on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RAW = [
    (all_reduce, start_all_reduce),
    (gather_first_dim, start_gather_first_dim),
    (reduce_scatter_first_dim, start_reduce_scatter_first_dim),
]


def world():
    dist.barrier()  # a rank that talks to nobody could leave while another one still connects
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def part_of_rank(rank, dtype):
    """Small whole numbers: every sum is exact in every dtype."""
    return (torch.arange(36.0).view(12, 3) % 7 + rank).to(dtype)


def raw_on_rank(dtype):
    group, results = world(), []
    for call, start in RAW:
        for strided in (False, True):
            if strided and call is all_reduce:
                continue
            x = part_of_rank(group.rank, dtype)
            x = x.t().contiguous().t() if strided else x
            same = x.clone()
            pending = start(same, group)
            found = call(x, group)
            assert torch.equal(pending.wait(), found)
            results.append((call.__name__, found))
            if call is not all_reduce:
                assert torch.equal(x, part_of_rank(group.rank, dtype))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_raw_collectives(size, dtype):
    parts = [part_of_rank(rank, dtype) for rank in range(size)]
    total = sum(parts[1:], start=parts[0])
    for rank, results in enumerate(run_on_ranks(size, raw_on_rank, dtype)):
        expected = {
            "all_reduce": total,
            "gather_first_dim": torch.cat(parts),
            "reduce_scatter_first_dim": total.chunk(size)[rank],
        }
        for name, found in results:
            assert found.dtype == dtype
            assert torch.equal(found, expected[name])


def given_on_rank():
    """A reduction whose result has a place already."""
    group = world()
    places = torch.full((2, 12 // group.size, 3), torch.nan, dtype=torch.float64)
    pending = start_reduce_scatter_first_dim(
        part_of_rank(group.rank, torch.float64), group, places[0]
    )
    found = pending.wait()
    return found.data_ptr() == places.data_ptr(), found, places[1].isnan().all().item()


def test_a_reduction_into_given_memory():
    total = part_of_rank(0, torch.float64) + part_of_rank(1, torch.float64)
    for rank, (is_there, found, rest_is_left) in enumerate(run_on_ranks(2, given_on_rank)):
        assert is_there
        assert rest_is_left
        assert torch.equal(found, total.chunk(2)[rank])


def maximum_on_rank():
    group = world()
    return all_reduce(torch.tensor([float(group.rank)]), group, dist.ReduceOp.MAX)


def test_other_reductions():
    assert [found.item() for found in run_on_ranks(2, maximum_on_rank)] == [1.0, 1.0]


def whole_on_rank():
    group = world()
    part = (torch.ones(2, 3) * 10**group.rank).requires_grad_()
    reduced = reduce_from_group(part, group)
    (reduced * torch.arange(6.0).view(2, 3)).sum().backward()
    return reduced.detach(), part.grad, part.detach()


@pytest.mark.parametrize("size", [2, 4])
def test_whole_activations(size):
    numbers = torch.arange(6.0).view(2, 3)
    for rank, (reduced, same_grad, part) in enumerate(run_on_ranks(size, whole_on_rank)):
        assert reduced.eq(sum(10**r for r in range(size))).all()
        assert torch.equal(same_grad, numbers)
        assert part.eq(10**rank).all()  # the input is left as it was


def sequence_on_rank():
    group = world()
    joined = gather_first_dim(part_of_rank(group.rank, torch.float64), group)
    whole = part_of_rank(group.rank, torch.float64).requires_grad_()
    kept = reduce_scatter_to_sequence(whole, group)
    (kept * (torch.arange(kept.numel()).view_as(kept) + 100 * group.rank)).sum().backward()
    return joined, kept.detach(), whole.grad


@pytest.mark.parametrize("size", [2, 3, 4])
def test_cut_activations(size):
    parts = [part_of_rank(rank, torch.float64) for rank in range(size)]
    rows = 12 // size
    each = torch.arange(3 * rows).view(rows, 3)
    joined_gradient = torch.cat([each + 100 * rank for rank in range(size)])
    for rank, (joined, kept, whole_grad) in enumerate(run_on_ranks(size, sequence_on_rank)):
        assert torch.equal(joined, torch.cat(parts))
        assert torch.equal(kept, sum(parts[1:], start=parts[0]).chunk(size)[rank])
        assert torch.equal(whole_grad, joined_gradient.double())


def exchanged_on_rank():
    """Each rank's term of the part of rank p is 100^p times its own numbers."""
    group = world()
    asked = []

    def term(rank):
        asked.append(rank)
        return part_of_rank(group.rank, torch.float64)[:2] * 100.0**rank

    return exchange_parts(term, group), asked


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_taken_part_by_part_is_the_sum(size):
    total = sum(part_of_rank(rank, torch.float64)[:2] for rank in range(size))
    for rank, (found, asked) in enumerate(run_on_ranks(size, exchanged_on_rank)):
        torch.testing.assert_close(found, total * 100.0**rank, rtol=1e-15, atol=0)
        assert sorted(asked) == list(range(size))  # each part is computed once
        assert asked[-1] == rank  # what goes nowhere comes last


def shared_gradient_on_rank():
    """The incoming gradient of the sum is also that of ``other``: it is passed on to both."""
    x, other = torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_()
    earlier = other * 1.0  # its backward comes after that of the sum
    total = reduce_from_group(x, world()) + earlier
    total.backward(torch.full((3,), 10.0 ** dist.get_rank()))
    return x.grad, other.grad


def test_backward_leaves_the_incoming_gradient_as_it_was():
    for rank, (reduced, other) in enumerate(run_on_ranks(2, shared_gradient_on_rank)):
        assert reduced.eq(10.0**rank).all()
        assert other.eq(10.0**rank).all()


def strided_on_rank():
    group = world()
    x = torch.arange(6.0).view(2, 3).t().requires_grad_()
    reduce_from_group(x, group).sum().backward()
    return reduce_from_group(x.detach(), group), x.grad


def test_strided_tensors():
    for reduced, gradient in run_on_ranks(2, strided_on_rank):
        assert torch.equal(reduced, 2 * torch.arange(6.0).view(2, 3).t())
        assert gradient.eq(1).all()


def layout_on_rank(sequence):
    group = world()
    groups = ParallelGroups(tp=group, sequence_parallel=sequence)
    x = part_of_rank(group.rank, torch.float64).requires_grad_()
    left = leave_tensor_parallel(x, groups)
    (left * 10**group.rank).sum().backward()
    return left.detach(), x.grad


@pytest.mark.parametrize("sequence", [False, True])
def test_what_sequence_parallelism_changes(sequence):
    total = part_of_rank(0, torch.float64) + part_of_rank(1, torch.float64)
    for rank, (left, gradient) in enumerate(run_on_ranks(2, layout_on_rank, sequence)):
        assert torch.equal(left, total.chunk(2)[rank] if sequence else total)
        halves = gradient.chunk(2)  # joined of what the ranks have kept, or passed on
        for place, half in enumerate(halves):
            assert half.eq(10 ** (place if sequence else rank)).all()


def watched_on_rank():
    log = []
    group = replace(world(), watch=lambda call, x: log.append((call, tuple(x.shape), x.dtype)))
    x = torch.ones(4, 3, dtype=torch.float64)
    for call, start in RAW:
        call(x.clone(), group)
        start(x.clone(), group).wait()
    exchange_parts(lambda _: x[:2].clone(), group)
    for call in (reduce_from_group, reduce_scatter_to_sequence):
        call(x.clone().requires_grad_(), group).sum().backward()
    return log


def test_the_watch_is_told_of_every_collective():
    names = ["all_reduce"] * 2 + ["all_gather"] * 2 + ["reduce_scatter"] * 2
    names += ["exchange", "all_reduce", "reduce_scatter", "all_gather"]
    rows = [4] * 6 + [2, 4, 4, 2]
    expected = [(name, (n, 3), torch.float64) for name, n in zip(names, rows, strict=True)]
    assert run_on_ranks(2, watched_on_rank) == [expected, expected]


def test_a_group_of_one_returns_its_input():
    def refuse(call, x):
        raise AssertionError(call)

    x = torch.ones(2, requires_grad=True)
    alone = Group(watch=refuse)
    calls = [reduce_from_group, reduce_scatter_to_sequence]
    for call in calls + [call for call, _ in RAW]:
        assert call(x, alone) is x
    for _, start in RAW:
        assert start(x, alone).wait() is x
    for sequence in (False, True):
        groups = ParallelGroups(tp=alone, sequence_parallel=sequence)
        assert leave_tensor_parallel(x, groups) is x


def uneven_on_rank():
    group = world()
    with pytest.raises(AssertionError):
        collectives.reduce_scatter_first_dim(torch.ones(3), group)
    return True


def test_only_even_cuts():
    assert run_on_ranks(2, uneven_on_rank) == [True, True]
