"""The rank grid: which process holds which shard.

Axes, slowest first: ``pp``, ``dp_replicate``, ``dp_shard``, ``tp``. Tensor-parallel ranks are
neighbours, since they talk most and neighbours share the fastest links. Data parallelism has two
axes: parameters and optimizer are sharded over ``dp_shard`` (say, the GPUs of a node) and copied
over ``dp_replicate``; the group ``dp`` is both together.

On GPUs a transfer of NCCL holds multiprocessors from its start to its end, also while it waits for
the other end, and nothing computes there meanwhile. So hidden states between stages, for which a
stage often waits, may take few; and what tensor-parallel ranks exchange, for which the next
product waits, comes before the kernels that are queued. (docs/performance.md has the
figures of the former; the latter was not measured alone.)
"""

from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lib.parallel.groups import Channel, Channels, Group, ParallelGroups

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_CHANNEL_CTAS = 2  # of 2, 4 and 8, which were all equally fast, what takes least


def build_mesh(
    device_type: str, *, tensor: int, pipeline: int, data: int, data_shard: int | None = None
) -> DeviceMesh:
    """Lays all processes out on a grid.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        tensor: tensor-parallel degree.
        pipeline: pipeline-parallel degree.
        data: data-parallel degree; the three must multiply to the world size.
        data_shard: ranks over which parameters are sharded, a divisor of ``data``; None: all.
    """
    assert tensor * pipeline * data == dist.get_world_size()
    shard = data if data_shard is None else data_shard
    assert data % shard == 0
    shape = (pipeline, data // shard, shard, tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel part of the grid, as ``fully_shard`` wants it."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    return mesh["dp_replicate", "dp_shard"]


def groups_of(mesh: DeviceMesh) -> ParallelGroups:
    """The groups of this process on ``mesh``; every process must call this.

    The fields that depend on more than the grid (``sequence_parallel``, ``shard_stream``) are
    left at their defaults.
    """
    pp, replicas, shards, tp = (mesh[axis].size() for axis in AXES)
    grid = _Grid(pp, replicas * shards, tp, on_gpus=mesh.device_type == "cuda")
    return ParallelGroups(
        tp=_tensor_group(mesh, grid),
        pp=_axis_group(mesh, "pp", "pp"),
        dp=_data_group(mesh, grid),
        shards=_axis_group(mesh, "dp_shard", "dp shards"),
        replicas=_axis_group(mesh, "dp_replicate", "dp replicas"),
        embedding=_embedding_group(grid),
        world=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, "world"),
        channels=_channels(grid),
    )


@dataclass(frozen=True)
class _Nccl:
    """How a connection of GPUs shares them with what computes.

    Attributes:
        most_ctas: multiprocessors that a transfer may hold.
        first: whether it gets them before a waiting kernel does.
    """

    most_ctas: int = 32
    first: bool = False


@dataclass(frozen=True)
class _Grid:
    """Sizes of the axes, both data-parallel ones as one, and the ranks at their crossings."""

    pp: int
    dp: int
    tp: int
    on_gpus: bool

    def rank_at(self, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank


def _axis_group(mesh: DeviceMesh, axis: str, name: str) -> Group:
    size = mesh[axis].size()
    process_group = mesh.get_group(axis) if size > 1 else None
    return Group(mesh.get_local_rank(axis), size, process_group, name)


def _data_group(mesh: DeviceMesh, grid: _Grid) -> Group:
    for axis in ("dp_shard", "dp_replicate"):
        if mesh[axis].size() == grid.dp:
            return _axis_group(mesh, axis, "dp")
    lines = [
        [grid.rank_at(pp_rank, dp_rank, tp_rank) for dp_rank in range(grid.dp)]
        for pp_rank, tp_rank in product(range(grid.pp), range(grid.tp))
    ]
    return _line_group(lines, "dp")


def _tensor_group(mesh: DeviceMesh, grid: _Grid) -> Group:
    if grid.tp == 1 or not grid.on_gpus:
        return _axis_group(mesh, "tp", "tp")
    lines = [
        [grid.rank_at(pp_rank, dp_rank, tp_rank) for tp_rank in range(grid.tp)]
        for pp_rank, dp_rank in product(range(grid.pp), range(grid.dp))
    ]
    return _line_group(lines, "tp", _Nccl(first=True))


def _embedding_group(grid: _Grid) -> Group:
    if grid.pp == 1:
        return Group(name="embedding")
    lines = [
        [grid.rank_at(pp_rank, dp_rank, tp_rank) for pp_rank in (0, grid.pp - 1)]
        for dp_rank, tp_rank in product(range(grid.dp), range(grid.tp))
    ]
    return _line_group(lines, "embedding")


def _line_group(lines: list[list[int]], name: str, nccl: _Nccl | None = None) -> Group:
    """The group of the line that holds this rank; a rank in none is alone."""
    me = dist.get_rank()
    mine = Group(name=name)
    for line in lines:  # every process takes part in making every group
        process_group = _new_group(line, nccl)
        if me in line:
            mine = Group(line.index(me), len(line), process_group, name)
    return mine


def _channels(grid: _Grid) -> Channels | None:
    if grid.pp == 1:
        return None
    ends: dict[str, Channel] = {}
    for dp_rank, tp_rank, stage in product(range(grid.dp), range(grid.tp), range(grid.pp)):
        before = grid.rank_at(stage, dp_rank, tp_rank)
        after = grid.rank_at((stage + 1) % grid.pp, dp_rank, tp_rank)
        nccl = _Nccl(most_ctas=_CHANNEL_CTAS) if grid.on_gpus else None
        ends |= _channel_ends("activations", (before, after), nccl)
        ends |= _channel_ends("gradients", (after, before), nccl)
    return Channels(**ends)


def _channel_ends(what: str, ranks: tuple[int, int], nccl: _Nccl | None) -> dict[str, Channel]:
    """This rank's end of a new channel by its field in ``Channels``; none on other ranks."""
    sender, receiver = ranks
    process_group = _new_group([sender, receiver], nccl)
    if process_group is None:
        return {}
    name = f"{what} {sender} -> {receiver}"
    if dist.get_rank() == sender:
        return {f"{what}_out": Channel(receiver, process_group, name)}
    return {f"{what}_in": Channel(sender, process_group, name)}


def _new_group(ranks: list[int], nccl: _Nccl | None = None) -> dist.ProcessGroup | None:
    """A new group, on its members; every process must call this.

    Args:
        ranks: the members.
        nccl: for a group that moves tensors of GPUs only.
    """
    if nccl is None:
        process_group = dist.new_group(ranks)
    else:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=nccl.first)
        options.config.max_ctas = nccl.most_ctas
        process_group = dist.new_group(ranks, backend="nccl", pg_options=options)
    return process_group if isinstance(process_group, dist.ProcessGroup) else None
