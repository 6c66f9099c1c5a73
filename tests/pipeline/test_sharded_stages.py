"""Stages whose chunks are sharded over data-parallel ranks give the gradients of one rank."""

from dataclasses import dataclass, replace

import torch

from lib.parallel.data_parallel import DataParallel, Unit
from lib.parallel.groups import Group
from lib.parallel.masters import create_masters, fill_shard
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import Cut, named_parts
from lib.pipeline.communication import Links
from lib.pipeline.executor import run_plan
from lib.pipeline.plan import stage_plan
from tests.distributed import run_on_ranks
from tests.pipeline.toy_stack import SHAPE, Chunk, batches, gradients_of, losses_of

EXACT = {"rtol": 1e-12, "atol": 1e-14}


@dataclass(frozen=True)
class ShardedCase:
    chunks: int
    sharding: str
    recompute: bool


SHARDED = [
    ShardedCase(chunks, sharding, recompute)
    for chunks in (1, 2)
    for sharding, recompute in (
        ("optimizer", False),
        ("gradients", False),
        ("parameters", False),
        ("parameters", True),
    )
]
PER_RANK = 4


class Sharded:
    """This rank's chunks as data parallelism keeps them, and a log of backwards and reductions."""

    def __init__(self, case, numbers, mesh):
        self.log = []
        groups = groups_of(mesh)
        shards = replace(groups.shards, watch=lambda call, _: self.log.append(call))
        self.chunks = torch.nn.ModuleList(
            Chunk(number, 2 * case.chunks, case.recompute) for number in numbers
        )
        for parameter in self.chunks.parameters():
            parameter.cuts = {"": Cut(tuple(parameter.shape), None, Group())}
        parts = {}
        for name, part in named_parts(self.chunks):
            place, _, inner = name.partition(".")
            parts[f"{numbers[int(place)]}.{inner}"] = part
        cuts = {name: part.cut for name, part in parts.items()}
        self.masters = create_masters(cuts, mesh, torch.float64)
        for name, part in parts.items():
            fill_shard(self.masters[name], part.value, mesh)
            part.value.fill_(torch.nan)
        units = [units_of(chunk) for chunk in self.chunks]
        self.engine = DataParallel(
            units, parts, self.masters, torch.float64, replace(groups, shards=shards), case.sharding
        )

    def step(self, links, micro_batches):
        """Losses; the masters have the gradients then."""
        self.log.clear()

        def before_backward(chunk, is_last):
            self.log.append((chunk, is_last))
            self.engine.before_backward(chunk, is_last=is_last)

        self.engine.start(trains=True)
        losses = run_plan(
            stage_plan(links.stage, 2, len(self.chunks), len(micro_batches), trains=True),
            lambda chunk, number, received: self.chunks[chunk](micro_batches[number], received),
            links,
            grad_scale=0.5,
            before_backward=before_backward,
            after_backward=self.engine.after_backward,
        )
        self.engine.finish()
        return losses

    def reductions(self):
        """For each backward, in order, whether it was its chunk's last, and its reductions."""
        found = []
        for entry in self.log:
            if isinstance(entry, tuple):
                found.append([entry[1], 0])
            elif entry == "reduce_scatter":
                found[-1][1] += 1
        return [tuple(each) for each in found]


def units_of(chunk):
    first = [] if chunk.embedding is None else [Unit((chunk.embedding,), lasts=True)]
    last = [] if chunk.head is None else [Unit((chunk.head,), lasts=True)]
    return [*first, Unit((chunk.layer,), lasts=False), *last]


def sharded_gradients(cases):
    """Pipeline of two stages, each sharded over two ranks; the gradients of a step."""
    mesh = build_mesh("cpu", tensor=1, pipeline=2, data=2)
    groups = groups_of(mesh)
    mine = batches(2 * PER_RANK, seed=4)[groups.dp.rank :: 2]
    results = []
    for case in cases:
        place = groups.pp.rank, groups.pp.size
        links = Links(groups.channels, *place, case.chunks, SHAPE, torch.float64)
        links.connect()
        numbers = [links.global_chunk(chunk) for chunk in range(case.chunks)]
        stage = Sharded(case, numbers, mesh)
        for _ in range(2):  # the second step finds what the first one left
            losses = stage.step(links, mine)
            full = {name: master.grad.full_tensor() for name, master in stage.masters.items()}
            for master in stage.masters.values():
                master.grad = None
        results.append((losses, full, stage.reductions()))
    return results


def test_sharded_chunks_give_the_gradients_of_one_rank():
    by_rank = run_on_ranks(4, sharded_gradients, SHARDED)
    for number, case in enumerate(SHARDED):
        chunks = [Chunk(place, 2 * case.chunks) for place in range(2 * case.chunks)]
        losses = losses_of(chunks, batches(2 * PER_RANK, seed=4))
        torch.stack(losses).sum().mul(0.5).backward()
        expected = {}
        for place, chunk in enumerate(chunks):
            expected |= gradients_of(chunk, place)
        for rank in range(4):
            stage, dp_rank = divmod(rank, 2)
            found_losses, gradients, reductions = by_rank[rank][number]
            check_reductions(case, reductions, stage)
            mine = [loss.detach() for loss in losses[dp_rank::2]]
            torch.testing.assert_close(found_losses, mine if stage == 1 else [], **EXACT)
            assert gradients.keys() == {n for n in expected if int(n.split(".")[0]) % 2 == stage}
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], **EXACT)


def check_reductions(case, reductions, stage):
    """Once for each unit of a chunk: in its last backward, or in each."""
    assert len(reductions) == PER_RANK * case.chunks
    assert sum(is_last for is_last, _ in reductions) == case.chunks
    counts = [count for is_last, count in reductions if is_last or case.sharding != "optimizer"]
    # A stage has one end of the model, beside the layer of one of its chunks.
    times = 1 if case.sharding == "optimizer" else PER_RANK
    assert sum(counts) == sum(count for _, count in reductions) == times * (case.chunks + 1)
