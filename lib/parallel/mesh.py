"""The rank grid: which process holds which shard.

Axes, slowest first: ``pp``, ``dp``, ``tp``. Tensor-parallel ranks are neighbours, since they talk
most and neighbours share the fastest links.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lib.parallel.groups import Group, ParallelGroups


def build_mesh(device_type: str, *, tensor: int, pipeline: int, data: int) -> DeviceMesh:
    """Lays all processes out on a grid.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        tensor: tensor-parallel degree.
        pipeline: pipeline-parallel degree.
        data: data-parallel degree; the three must multiply to the world size.
    """
    assert tensor * pipeline * data == dist.get_world_size()
    return init_device_mesh(
        device_type, (pipeline, data, tensor), mesh_dim_names=("pp", "dp", "tp")
    )


def _group(mesh: DeviceMesh, axis: str) -> Group:
    size = mesh[axis].size()
    process_group = mesh.get_group(axis) if size > 1 else None
    return Group(rank=mesh.get_local_rank(axis), size=size, process_group=process_group)


def groups_of(mesh: DeviceMesh) -> ParallelGroups:
    """The groups of this process on ``mesh``."""
    return ParallelGroups(tp=_group(mesh, "tp"), pp=_group(mesh, "pp"), dp=_group(mesh, "dp"))
