"""Data parallelism by ``fully_shard``: what is sharded, in which precision, and when reduced.

The fp32 parameters that ``fully_shard`` keeps are the master weights: each use casts them to the
compute dtype. Gradients of the micro batches of one step are added up in fp32 and reduced once,
with the last micro batch. The parameters stay gathered between forward and backward and between
micro batches ("optimizer" sharding): one gather and one reduction a step.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_data_parallel(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype
) -> None:
    """Shards a model's parameters, gradients and optimizer over the data-parallel mesh.

    Args:
        model: the whole model, changed in place.
        blocks: submodules gathered and reduced one by one, so that communication overlaps.
        mesh: one-dimensional data-parallel mesh.
        compute_dtype: dtype of parameters and activations in forward and backward.
    """
    # At least fp32: bf16 sums lose small gradients (256 + 1 = 256).
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of the whole batch: gradients add up.
            # As a plain sum, since gloo knows no other that takes a factor.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, synchronise: bool) -> None:
    """Says whether the coming backward reduces gradients: only a step's last one does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(synchronise)
        model.set_is_last_backward(synchronise)
        model.set_reshard_after_backward(synchronise)


def reshard(model: nn.Module) -> None:
    """Drops gathered parameters, so that the model shows its stored fp32 shards again.

    A forward pass without a backward (validation) leaves the gathered copies in place.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
