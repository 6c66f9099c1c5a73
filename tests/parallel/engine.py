"""A small model as training keeps it, with what gathers its parameters and sums gradients."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch

from lib.model.gpt import GPTModel
from lib.model.loss import token_losses
from lib.parallel.compute_block import _Buffer
from lib.parallel.data_parallel import DataParallel
from lib.parallel.groups import ParallelGroups
from lib.parallel.masters import create_masters, fill_shard
from lib.parallel.mesh import groups_of
from lib.parallel.storage import named_parts
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import forward_only, one_forward_one_backward
from tests.model.models import build, rough_weights


@dataclass(frozen=True)
class Engine:
    """A model, its masters by name, and the engine between them."""

    model: GPTModel
    masters: dict
    data_parallel: DataParallel
    groups: ParallelGroups

    def validate(self, batches):
        """The summed losses of micro batches, without gradients."""
        self.data_parallel.start(trains=False)
        return run_plan(forward_only(len(batches)), self._forward(batches))

    def step(self, batches, scale=1.0):
        """The summed losses of micro batches; the masters have the gradients then."""
        self.data_parallel.start(trains=True)
        losses = run_plan(
            one_forward_one_backward(0, 1, len(batches)),
            self._forward(batches),
            grad_scale=scale,
            before_backward=lambda chunk, last: self.data_parallel.before_backward(
                chunk, is_last=last
            ),
            after_backward=self.data_parallel.after_backward,
        )
        self.data_parallel.finish()
        return losses

    def _forward(self, batches):
        return lambda _chunk, number, _received: token_losses(self.model, batches[number]).sum()


def make_engine(
    config,
    mesh,
    dtype=torch.float64,
    sharding="optimizer",
    *,
    sequence=False,
    recompute=None,
    watch=None,
):
    """The model of ``rough_weights``.

    Args:
        config: of the model.
        mesh: from ``build_mesh``.
        dtype: that is computed in; masters are fp32 or wider.
        sharding: ``parallel.sharding``.
        sequence: whether activations between layers are cut along the sequence.
        recompute: what backward computes again.
        watch: told of the collectives of the ranks that share masters.
    """
    groups = groups_of(mesh)
    shards = replace(groups.shards, watch=watch)
    groups = replace(groups, sequence_parallel=sequence, shards=shards)
    model = build(config, groups=groups, recompute=recompute)
    parts = dict(named_parts(model))
    cuts = {name: part.cut for name, part in parts.items()}
    masters = create_masters(cuts, mesh, torch.promote_types(dtype, torch.float32))
    for name, value in rough_weights(config).items():
        fill_shard(masters[name], cuts[name].part_of(value), mesh)
    for part in parts.values():  # nothing may compute with what a layer declared
        part.value.fill_(torch.nan)
    data_parallel = DataParallel([model.units()], parts, masters, dtype, groups, sharding)
    return Engine(model, masters, data_parallel, groups)


@contextmanager
def poisoned_memory():
    """New memory holds what is no number until it is written."""
    allocate = _Buffer.allocate

    def poisoned(buffer):
        if not buffer.is_there:
            allocate(buffer)
            buffer.flat.data.fill_(torch.nan)  # not seen by autograd, as little as a gather

    torch.use_deterministic_algorithms(mode=True)  # which also fills what ``empty`` gives
    try:
        assert torch.empty(3).isnan().all()
        with mock.patch.object(_Buffer, "allocate", poisoned):
            yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
