"""The rank grid: pp outermost, tp innermost, as Megatron orders ranks without experts."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from lib.parallel.mesh import build_mesh, data_mesh, groups_of
from tests.distributed import run_on_ranks


def members_by_sum(process_group):
    """Who takes part in a collective: each adds the power of two of its own rank."""
    total = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(total, group=process_group)
    return [rank for rank in range(dist.get_world_size()) if total.item() >> rank & 1]


def places_on_rank(layout):
    tensor, pipeline, data, data_shard = layout
    mesh = build_mesh("cpu", tensor=tensor, pipeline=pipeline, data=data, data_shard=data_shard)
    groups = groups_of(mesh)
    seen = {}
    for axis in ("tp", "pp", "dp", "shards", "replicas", "embedding", "world"):
        group = getattr(groups, axis)
        assert group.name == {"shards": "dp shards", "replicas": "dp replicas"}.get(axis, axis)
        if axis != "world":
            assert (group.process_group is None) == (group.size == 1)
        alone = group.process_group is None
        members = [dist.get_rank()] if alone else members_by_sum(group.process_group)
        seen[axis] = (group.rank, group.size, members)
    part = data_mesh(mesh)
    for axis in part.mesh_dim_names:
        members = members_by_sum(part.get_group(axis))
        seen[axis] = (part.get_local_rank(axis), part[axis].size(), members)
    return seen


def expected_places(rank, layout):
    """Place and members of each group, from the axes' strides."""
    tensor, pipeline, data, data_shard = layout
    shard = data if data_shard is None else data_shard
    sizes = {"pp": pipeline, "dp_replicate": data // shard, "dp_shard": shard, "tp": tensor}
    everyone = [
        dict(zip(sizes, place, strict=True)) for place in product(*map(range, sizes.values()))
    ]
    me = everyone[rank]

    def line(*axes):
        ranks = [
            other
            for other, place in enumerate(everyone)
            if all(place[axis] == me[axis] for axis in sizes if axis not in axes)
        ]
        return ranks.index(rank), len(ranks), ranks

    expected = {axis: line(axis) for axis in ("tp", "pp")}
    expected["dp"] = line("dp_replicate", "dp_shard")
    ends = sorted({expected["pp"][2][0], expected["pp"][2][-1]})
    alone = rank not in ends or len(ends) == 1
    expected["embedding"] = (0, 1, [rank]) if alone else (ends.index(rank), 2, ends)
    expected["world"] = (rank, len(everyone), list(range(len(everyone))))
    expected["shards"] = line("dp_shard")
    expected["replicas"] = line("dp_replicate")
    expected["dp_shard"] = line("dp_shard")
    if data != shard:
        expected["dp_replicate"] = line("dp_replicate")
    return expected


LAYOUTS = [  # tensor, pipeline, data, data_shard
    (2, 1, 2, None),
    (1, 2, 2, None),
    (2, 2, 1, None),
    (4, 1, 1, None),
    (1, 1, 4, None),
    (1, 1, 4, 2),
    (1, 2, 2, 1),
    (1, 4, 1, None),
    (1, 3, 1, None),
    (1, 2, 4, 2),
    (2, 2, 2, 1),
    (2, 1, 4, 2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_knows_its_place_and_its_groups_sum_over_their_members(layout):
    tensor, pipeline, data, _ = layout
    for rank, seen in enumerate(run_on_ranks(tensor * pipeline * data, places_on_rank, layout)):
        assert seen == expected_places(rank, layout)


def neighbours_on_rank(tensor, pipeline, data):
    """What came in over both channels, when each rank sent its own number over both."""
    channels = groups_of(build_mesh("cpu", tensor=tensor, pipeline=pipeline, data=data)).channels
    if channels is None:
        return None
    mine = torch.tensor([dist.get_rank()])
    works, came = [], []
    for channel in (channels.activations_in, channels.gradients_in):
        came.append(torch.zeros(1, dtype=torch.long))
        works.append(dist.irecv(came[-1], src=channel.peer, group=channel.process_group))
    works += [
        dist.isend(mine, dst=channel.peer, group=channel.process_group)
        for channel in (channels.activations_out, channels.gradients_out)
    ]
    for work in works:
        work.wait()
    ends = [getattr(channels, name) for name in ("activations_in", "activations_out")]
    ends += [getattr(channels, name) for name in ("gradients_in", "gradients_out")]
    assert len({id(end.process_group) for end in ends}) == 4  # no two directions share one
    return [int(value) for value in came], [end.peer for end in ends], [end.name for end in ends]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data"), [(1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]
)
def test_channels_connect_the_stages_in_a_ring(tensor, pipeline, data):
    size, stage = tensor * pipeline * data, tensor * data
    for rank, seen in enumerate(run_on_ranks(size, neighbours_on_rank, tensor, pipeline, data)):
        before, after = (rank - stage) % size, (rank + stage) % size
        came, peers, names = seen
        assert came == [before, after]
        assert peers == [before, after, after, before]
        assert names == [
            f"activations {before} -> {rank}",
            f"activations {rank} -> {after}",
            f"gradients {after} -> {rank}",
            f"gradients {rank} -> {before}",
        ]


def test_one_stage_has_no_channels():
    assert run_on_ranks(2, neighbours_on_rank, 2, 1, 1) == [None, None]
