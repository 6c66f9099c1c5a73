"""The sizes of blocks, beside the buffers that the engine of data parallelism makes."""

import pytest
import torch

from lib.config.operation import RuntimeConfig
from lib.config.schema import ParallelConfig
from lib.parallel.mesh import build_mesh
from lib.parallel.storage import local
from lib.plan.parameters import BlockSize, chunk_blocks
from lib.plan.work import Work
from tests.distributed import run_on_ranks
from tests.model.models import CONFIGS, PADDED
from tests.parallel.engine import make_engine


def work_for(config, tensor, data, data_shard=None):
    parallel = ParallelConfig(tensor=tensor, data=data, data_shard=data_shard)
    return Work(config, PADDED, 8, 1, 1, parallel, "bf16", RuntimeConfig())


def engine_on_rank(name, tensor, data, data_shard):
    mesh = build_mesh("cpu", tensor=tensor, pipeline=1, data=data, data_shard=data_shard)
    engine = make_engine(CONFIGS[name], mesh, torch.bfloat16)
    blocks = [
        BlockSize(
            block._values.flat.numel(), block._width, block._sum is not None, block.plan.lasts
        )
        for block in engine.data_parallel._blocks
    ]
    assert all(
        b._gradients.flat.numel() == b._values.flat.numel() for b in engine.data_parallel._blocks
    )
    return blocks, sum(local(master).numel() for master in engine.masters.values())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", (1, 1, None)),
        ("llama", (1, 3, None)),
        ("llama", (4, 1, None)),  # fewer key heads than ranks
        ("qwen", (2, 2, None)),
        ("gpt2", (1, 4, 2)),
        ("llama", (4, 2, 1)),
    ],
)
def test_buffers_are_those_of_the_engine(name, layout):
    tensor, data, _ = layout
    expected = list(chunk_blocks(work_for(CONFIGS[name], *layout), 0))
    ranks = run_on_ranks(tensor * data, engine_on_rank, name, *layout, timeout=120.0)
    for blocks, _ in ranks:
        assert blocks == expected
    assert ranks[0][1] == sum(block.width for block in expected)
