"""The conjugate pair: identity forward and sum backward, and the other way round."""

import pytest
import torch
import torch.distributed as dist

from lib.parallel.collectives import all_reduce, copy_to_group, reduce_from_group
from lib.parallel.groups import Group
from tests.distributed import run_on_ranks


def world():
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def both_on_rank():
    rank = dist.get_rank()
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    copied = copy_to_group(x, world())
    (copied * (rank + 1)).sum().backward()
    part = (torch.ones(2, 3) * 10**rank).requires_grad_()
    reduced = reduce_from_group(part, world())
    (reduced * torch.arange(6.0).view(2, 3)).sum().backward()
    return copied.detach(), x.grad, reduced.detach(), part.grad, part.detach()


@pytest.mark.parametrize("size", [2, 4])
def test_forward_and_backward(size):
    numbers = torch.arange(6.0).view(2, 3)
    for rank, (copied, sum_grad, reduced, same_grad, part) in enumerate(
        run_on_ranks(size, both_on_rank)
    ):
        assert torch.equal(copied, numbers)
        assert sum_grad.eq(sum(range(1, size + 1))).all()
        assert reduced.eq(sum(10**r for r in range(size))).all()
        assert torch.equal(same_grad, numbers)
        assert part.eq(10**rank).all()  # the input is left as it was


def shared_gradient_on_rank():
    """The incoming gradient of the copy is also that of ``other``: a sum passes one on to both."""
    x, other = torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_()
    earlier = other * 1.0  # its backward comes after that of the copy
    total = copy_to_group(x, world()) + earlier
    total.backward(torch.full((3,), 10.0 ** dist.get_rank()))
    return x.grad, other.grad


def test_backward_leaves_the_incoming_gradient_as_it_was():
    for rank, (copied, other) in enumerate(run_on_ranks(2, shared_gradient_on_rank)):
        assert copied.eq(11.0).all()
        assert other.eq(10.0**rank).all()


def strided_on_rank():
    x = torch.arange(6.0).view(2, 3).t().requires_grad_()
    reduce_from_group(x, world()).sum().backward()
    y = torch.arange(6.0).requires_grad_()
    copy_to_group(y, world()).view(2, 3).t().sum().backward()
    maximum = all_reduce(torch.tensor([float(dist.get_rank())]), world(), dist.ReduceOp.MAX)
    return reduce_from_group(x.detach(), world()), x.grad, y.grad, maximum


def test_strided_tensors_and_other_reductions():
    for reduced, gradient, summed, maximum in run_on_ranks(2, strided_on_rank):
        assert torch.equal(reduced, 2 * torch.arange(6.0).view(2, 3).t())
        assert gradient.eq(1).all()
        assert summed.eq(2).all()
        assert maximum.item() == 1.0


def test_a_group_of_one_returns_its_input():
    x = torch.ones(2, requires_grad=True)
    assert copy_to_group(x, Group()) is x
    assert reduce_from_group(x, Group()) is x
    assert all_reduce(x, Group()) is x
