"""Data parallelism by ``fully_shard``: what is sharded, in which precision, and when reduced.

The parameters that ``fully_shard`` keeps are the master weights, fp32 or wider: each use casts
them to the compute dtype. Gradients of a step's micro batches are added up in fp32 or wider.

| sharding | parameters | gradients | communication of a step with m micro batches |
|---|---|---|---|
| optimizer | gathered once a step | whole, reduced with the last | 1 gather, 1 reduction |
| gradients | gathered once a step | sharded, reduced with each | 1 gather, m reductions |
| parameters | gathered for each use | sharded, reduced with each | 2 m gathers, m reductions |

Master weights and moments are sharded in all three. On a grid with replicas the shards' gradients
are summed over the replicas as well.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

Sharding = Literal["optimizer", "gradients", "parameters"]


def shard_data_parallel(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    sharding: Sharding = "optimizer",
) -> None:
    """Shards a model's parameters, gradients and optimizer over the data-parallel mesh.

    Args:
        model: the whole model, or one chunk of it; changed in place.
        blocks: submodules gathered and reduced one by one, so that communication overlaps.
        mesh: one-dimensional data-parallel mesh, or (replicas, shards).
        compute_dtype: dtype of parameters and activations in forward and backward.
        sharding: what is sharded between uses.
    """
    # At least fp32: bf16 sums lose small gradients (256 + 1 = 256).
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    again = sharding == "parameters"
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of the whole batch: gradients add up.
            # As a plain sum, since gloo knows no other that takes a factor.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, sharding: Sharding, *, is_last: bool) -> None:
    """Prepares the coming backward of ``model``: what is reduced and what stays gathered.

    Args:
        model: from ``shard_data_parallel``.
        sharding: as it was sharded.
        is_last: whether this is the model's last backward of the step.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_last or sharding != "optimizer")
    model.set_is_last_backward(is_last)
    model.set_reshard_after_backward(is_last or sharding == "parameters")


def reshard(model: nn.Module) -> None:
    """Drops gathered parameters, so that the model shows its stored shards again.

    A forward pass without a backward (validation) leaves the gathered copies in place.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def fill_shard(parameter: nn.Parameter, value: Tensor, mesh: DeviceMesh) -> None:
    """Gives a sharded parameter this rank's piece of its value.

    Args:
        parameter: from a model after ``shard_data_parallel``.
        value: this tensor-parallel rank's part, not cut over the data-parallel ranks.
        mesh: that of ``shard_data_parallel``.
    """
    assert isinstance(parameter, DTensor)
    axis = mesh.ndim - 1
    # fully_shard cuts dimension 0 as torch.chunk does; late ranks may be left without a row.
    pieces = value.chunk(mesh.size(axis), dim=0)
    rank = mesh.get_local_rank(axis)
    piece = pieces[rank] if rank < len(pieces) else value[:0]
    parameter.to_local().copy_(piece)
