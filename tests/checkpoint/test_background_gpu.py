"""The same promises on a GPU: sharded parameters, fused optimizer, the GPU's random stream."""

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.rank_work import resume_on_gpu


@pytest.mark.gpu
def test_resume_on_a_gpu_is_bit_for_bit(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        losses, draws = resume_on_gpu(tmp_path / "state")
    finally:
        dist.destroy_process_group()
    assert losses[0] == losses[1]
    assert draws[0] == draws[1]
