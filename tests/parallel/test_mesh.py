"""The rank grid: pp outermost, tp innermost, as Megatron orders ranks without experts."""

import pytest
import torch
import torch.distributed as dist

from lib.parallel.mesh import build_mesh, groups_of
from tests.distributed import run_on_ranks


def places_on_rank(tensor, pipeline, data):
    groups = groups_of(build_mesh("cpu", tensor=tensor, pipeline=pipeline, data=data))
    seen = {}
    for axis in ("tp", "pp", "dp"):
        group = getattr(groups, axis)
        members = [dist.get_rank()]
        if group.size > 1:
            gathered = [torch.zeros(1, dtype=torch.long) for _ in range(group.size)]
            mine = torch.tensor([dist.get_rank()])
            dist.all_gather(gathered, mine, group=group.process_group)
            members = [int(value) for value in gathered]
        else:
            assert group.process_group is None
        seen[axis] = (group.rank, group.size, members)
    return seen


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data"), [(2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 1, 4)]
)
def test_every_rank_knows_its_place(tensor, pipeline, data):
    for rank, seen in enumerate(run_on_ranks(4, places_on_rank, tensor, pipeline, data)):
        tp_rank, dp_rank, pp_rank = rank % tensor, rank // tensor % data, rank // tensor // data
        base = rank - tp_rank
        assert seen["tp"] == (tp_rank, tensor, [base + i for i in range(tensor)])
        base = rank - dp_rank * tensor
        assert seen["dp"] == (dp_rank, data, [base + i * tensor for i in range(data)])
        stage = tensor * data
        base = rank - pp_rank * stage
        assert seen["pp"] == (pp_rank, pipeline, [base + i * stage for i in range(pipeline)])
