"""CUDA graphs: a run that is replayed has the bits of the one that is launched kernel by kernel."""

import pytest
import torch

from lib.config.operation import RuntimeConfig
from lib.train import graphs, setup
from lib.train.comparison import compare, train_on_rank
from lib.train.graphs import StepGraphs
from lib.train.random_tokens import random_corpus
from tests.distributed import run_on_ranks
from tests.gpu.test_layouts_gpu import VOCABULARY, config_of

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
]
STEPS = 8
RUNTIMES = {
    "plain": {"attention": "sdpa"},
    "recompute": {"attention": "sdpa", "recompute": "full"},
    "torch": {"attention": "reference", "kernels": "torch"},
    "cudnn": {"attention": "cudnn"},
}


def train_both(text, runtime):
    """The outcome without and with graphs, and why there were none at the end."""
    made = []

    def step_graphs(*args, **options):
        made.append(StepGraphs(*args, **options))
        return made[-1]

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "StepGraphs", step_graphs)
        patch.setattr(graphs, "_SOONER", float("inf"))
        for choice in ("off", "auto"):
            wanted = RuntimeConfig(**runtime, cuda_graphs=choice)
            found.append(train_on_rank(text, wanted.model_dump_json(), STEPS, "cuda"))
    return *found, made[-1].obstacle


def train_all(text, runtimes):
    return [train_both(text, runtime) for runtime in runtimes]


def test_replayed_steps_have_the_same_bits(tmp_path):
    corpus = random_corpus(tmp_path, VOCABULARY, 600)
    text = config_of(corpus, "bf16", {"phases": ()}, STEPS).to_json()
    runtimes = list(RUNTIMES.values())
    (found,) = run_on_ranks(1, train_all, text, runtimes, timeout=150.0, device="cuda")
    for kind, (plain, replayed, obstacle) in zip(RUNTIMES, found, strict=True):
        assert obstacle is None, kind
        difference = compare(replayed, plain)
        # cuDNN's backward adds up in any order.
        bound = 1e-3 if kind == "cudnn" else 0.0
        assert difference.loss <= bound, (kind, difference)
        assert difference.weight[0] <= bound * 10, (kind, difference)
