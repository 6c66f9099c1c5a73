"""What `make bench` compares is the same work: both ways take the same steps."""

import pytest
import torch

from lib.workflow.speed import compared_steps
from tests.distributed import run_on_ranks
from tests.model.models import CONFIGS


def losses_of_both(name, compute):
    ours, plain = compared_steps(
        CONFIGS[name],
        compute=compute,
        vocab_size=256,
        shape=(8, 2),
        micro_batches=3,
        device=torch.device("cpu"),
    )
    return [ours() for _ in range(5)], [plain() for _ in range(5)]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_both_ways_take_the_same_steps(name):
    ours, plain = run_on_ranks(1, losses_of_both, name, "fp32")[0]
    assert ours == pytest.approx(plain, rel=1e-5)
    assert ours[-1] < ours[0]
