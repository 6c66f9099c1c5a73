"""Blocks by themselves: uneven rows over ranks, padding, rows that a rank does not use, memory."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.layers.parameter_gradient import overwritable
from lib.parallel.compute_block import Block, BlockPlan
from lib.parallel.groups import Group
from lib.parallel.masters import create_masters, fill_shard
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import Cut, local, named_parts, replica, stacked
from tests.distributed import run_on_ranks
from tests.parallel.engine import poisoned_memory

ALONE = Group()
USED = slice(1, 4)


class Owner(nn.Module):
    """Numbers of rows that nobody can share evenly, some of them used in part."""

    def __init__(self):
        super().__init__()
        self.weight = overwritable(
            stacked(
                {
                    "a": Cut((5, 3), None, ALONE),
                    "b": Cut((6, 3), None, ALONE, used=USED, sums_gradient=True),
                    "c": Cut((1, 3), None, ALONE),
                }
            )
        )
        self.table = replica((7, 2), ALONE)
        self.scale = replica((2,), ALONE, sums_gradient=True)


NAMES = ["a.weight", "b.weight", "c.weight", "table", "scale"]


def value_of(name, shape, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + NAMES.index(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass
class Made:
    block: Block
    owner: Owner
    parts: dict
    masters: dict
    mesh: object

    def set_masters(self, seed):
        for name, master in self.masters.items():
            fill_shard(master, value_of(name, master.shape, seed), self.mesh)

    def check_values(self, seed, dtype=torch.float64):
        for name, part in self.parts.items():
            full = value_of(name, part.cut.full_shape, seed).to(dtype)
            assert torch.equal(part.value, part.cut.used_of(full))

    def add_gradients(self, seed):
        """What a backward does: the first product replaces, all else is added."""
        for name, part in self.parts.items():
            gradient = gradient_on_rank(name, part.cut.full_shape, seed, dist.get_rank())
            if getattr(part.parameter, "overwrite_grad", False):
                part.grad.copy_(part.cut.used_of(gradient))
            else:
                part.grad.add_(part.cut.used_of(gradient))
        if self.owner.weight.overwrite_grad:
            self.owner.weight.overwrite_grad = False

    def check_gradients(self, seeds):
        """The sum over ranks and micro batches; nothing in rows that are not used."""
        for name, part in self.parts.items():
            expected = torch.zeros(part.cut.full_shape, dtype=torch.float64)
            for seed in seeds:
                for rank in range(dist.get_world_size()):
                    gradient = gradient_on_rank(name, part.cut.full_shape, seed, rank)
                    part.cut.used_of(expected).add_(part.cut.used_of(gradient))
            master = self.masters[name]
            found = master.grad.full_tensor()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
            assert master.grad.placements == master.placements
            buffer = torch.empty(0, dtype=found.dtype).set_(local(master.grad).untyped_storage())
            assert buffer.isfinite().all()  # between the shards too


def gradient_on_rank(name, shape, seed, rank):
    return value_of(name, shape, 1000 + 100 * seed + rank)


def look_at(call, tensor):
    """As the watch of ``launch.debug`` does, which would name a rank for nothing."""
    assert tensor.isfinite().all(), call


def made(layout, dtype=torch.float64, **plan):
    mesh = build_mesh("cpu", tensor=1, pipeline=1, **layout)
    groups = groups_of(mesh)
    shards, replicas = (replace(g, watch=look_at) for g in (groups.shards, groups.replicas))
    owner = Owner()
    parts = dict(named_parts(owner))
    assert list(parts) == NAMES
    cuts = {name: part.cut for name, part in parts.items()}
    masters = create_masters(cuts, mesh, torch.promote_types(dtype, torch.float32))
    flags = {"frees_values": False, "frees_gradients": False, "lasts": False} | plan
    plan = BlockPlan(dtype, shards, replicas, **flags)
    return Made(Block(parts, masters, plan), owner, parts, masters, mesh)


def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


def steps_on_rank(layout, frees_values, frees_gradients):
    """Three steps of two micro batches, with a validation before each."""
    with poisoned_memory():
        found = made(layout, frees_values=frees_values, frees_gradients=frees_gradients)
        block = found.block
        for step in range(3):
            found.set_masters(step)
            for _ in range(2):
                block.start(trains=False)
                block.ready()
                found.check_values(step)
                block.release()
            found.set_masters(10 + step)
            block.start(trains=True)
            for micro_batch in range(2):
                block.ready()
                found.check_values(10 + step)
                block.release()
                block.begin_backward()
                found.check_values(10 + step)
                found.add_gradients(10 * step + micro_batch)
                if frees_gradients or micro_batch == 1:
                    block.reduce()
                block.release()
            assert all(master.grad is None for master in found.masters.values())
            block.finish()
            found.check_gradients([10 * step, 10 * step + 1])
            for master in found.masters.values():
                # As clipping and the sum over tensor-parallel ranks do, in all rows.
                local(master.grad).fill_(torch.nan)
                master.grad = None
            assert (bytes_of(found.owner.table) == 0) == frees_values
            assert (bytes_of(found.owner.table.grad) == 0) == frees_gradients
    return True


LAYOUTS = {
    "one rank": {"data": 1},
    "2 shards": {"data": 2},
    "3 shards": {"data": 3},
    "4 shards": {"data": 4},
    "2 replicas of 2 shards": {"data": 4, "data_shard": 2},
    "2 replicas": {"data": 2, "data_shard": 1},
}
KEEPS = [
    (layout, values, gradients)
    for layout in LAYOUTS
    for values, gradients in ((False, False), (False, True), (True, True))
    # One rank has nothing to free: all is its own.
    if not gradients or LAYOUTS[layout].get("data_shard", LAYOUTS[layout]["data"]) > 1
]


@pytest.mark.parametrize(("layout", "frees_values", "frees_gradients"), KEEPS)
def test_values_and_gradients_of_uneven_rows(layout, frees_values, frees_gradients):
    """Fault: padding that is no number, or the step before in rows that a rank does not use."""
    shape = LAYOUTS[layout]
    assert all(run_on_ranks(shape["data"], steps_on_rank, shape, frees_values, frees_gradients))


def types_on_rank(dtype, size):
    found = made({"data": size}, dtype)
    found.set_masters(1)
    found.block.start(trains=True)
    found.block.ready()
    found.check_values(1, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in (found.owner.weight, found.owner.table, found.owner.scale):
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.dtype == dtype
        assert parameter.grad.dtype == wide
        assert parameter.data_ptr() % 16 == parameter.grad.data_ptr() % 16 == 0
    place = found.owner.table.grad.data_ptr()
    for _ in range(2):  # autograd adds in place, in the gradient's type
        (found.owner.table * torch.full((), 257.0, dtype=wide).to(dtype)).sum().backward()
    assert found.owner.table.grad.data_ptr() == place
    assert found.owner.table.grad.dtype == wide
    found.block.reduce()
    found.block.finish()
    masters = found.masters.values()
    assert all(master.grad.dtype == master.dtype == wide for master in masters)
    return found.masters["table"].grad.full_tensor()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parameters_are_of_the_compute_type_and_gradients_of_the_masters(dtype, size):
    once = torch.tensor(257.0).to(dtype).item()
    for total in run_on_ranks(size, types_on_rank, dtype, size):
        assert total.eq(2 * size * once).all()


def unused_on_rank(layout, frees_gradients):
    """The second step's backward does not come by."""
    found = made(layout, frees_gradients=frees_gradients)
    found.set_masters(0)  # the watch would find what is no number in memory of others
    for seeds in ([1], []):
        found.block.start(trains=True)
        found.block.begin_backward()
        for seed in seeds:
            found.add_gradients(seed)
        found.block.reduce()
        found.block.finish()
        found.check_gradients(seeds)
    return True


@pytest.mark.parametrize(
    ("layout", "frees_gradients"),
    [("one rank", False), ("2 replicas", False), ("2 shards", False), ("2 shards", True)],
)
def test_what_no_backward_reached_has_a_gradient_of_zero(layout, frees_gradients):
    """Fault: a product that was to take the place of the last step's gradient left it."""
    shape = LAYOUTS[layout]
    assert all(run_on_ranks(shape["data"], unused_on_rank, shape, frees_gradients))


def stale_on_rank(frees_values, is_waited):
    """Gathers that nobody has asked for, before the masters change."""
    found = made({"data": dist.get_world_size()}, frees_values=frees_values)
    for seed in range(3):
        found.set_masters(seed)
        found.block.start(trains=False)
        if is_waited:
            found.block.ready()
        else:
            found.block.begin_gather()
        found.set_masters(10 + seed)
        found.block.start(trains=seed == 2)
        found.block.ready()
        found.check_values(10 + seed)
    return True


@pytest.mark.parametrize(("size", "frees_values"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("is_waited", [False, True])
def test_a_start_forgets_what_was_gathered_before(size, frees_values, is_waited):
    assert all(run_on_ranks(size, stale_on_rank, frees_values, is_waited))


def leftover_on_rank():
    """A gather begun and not used in a step is over at its end."""
    found = made({"data": 2}, frees_values=True, frees_gradients=True)
    block = found.block
    for seed in range(2):
        found.set_masters(seed)
        block.start(trains=True)
        block.begin_backward()
        found.add_gradients(seed)
        block.reduce()
        block.release()
        block.begin_gather()
        block.begin_gather()  # once is enough
        block.finish()
        found.check_gradients([seed])
        assert bytes_of(found.owner.table) == 0
    found.set_masters(7)
    block.start(trains=False)
    block.ready()
    found.check_values(7)
    return True


def test_a_gather_that_was_one_too_many():
    assert all(run_on_ranks(2, leftover_on_rank))


def partial_on_rank():
    found = made({"data": dist.get_world_size()})
    shapes = {tuple(gradient.shape) for gradient in found.block.partial_gradients()}
    owned = {tuple(local(found.masters[name].detach()).shape) for name in ("b.weight", "scale")}
    return shapes == owned


@pytest.mark.parametrize("size", [1, 2])
def test_only_parts_are_to_be_summed_over_other_ranks(size):
    assert all(run_on_ranks(size, partial_on_rank))
