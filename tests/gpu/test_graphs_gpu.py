"""CUDA graphs: a run that is replayed has the bits of the one that is launched kernel by kernel."""

import pytest
import torch

from lib.config.operation import RuntimeConfig
from lib.config.schema import ParallelConfig
from lib.train import graphs, setup
from lib.train.comparison import compare, train_on_rank, with_layout
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
PLAIN = {"attention": "sdpa"}
RUNTIMES = {
    "plain": PLAIN,
    "recompute": {"attention": "sdpa", "recompute": "full"},
    "torch": {"attention": "reference", "kernels": "torch"},
    "cudnn": {"attention": "cudnn"},
}
# Of two processes; where there is one GPU they share it.
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2+sp": {"tensor": 2, "sequence": True},
    "pp2x2": {"pipeline": 2, "virtual_stages": 2},
    "dp2": {"data": 2},
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


def require_same_bits(tmp_path, layout, processes, runtimes):
    corpus = random_corpus(tmp_path, VOCABULARY, 600)
    config = config_of(corpus, "bf16", {"phases": ()}, STEPS)
    text = with_layout(config, ParallelConfig(**layout)).to_json()
    wanted = list(runtimes.values())
    found, *_ = run_on_ranks(processes, train_all, text, wanted, timeout=200.0, device="cuda")
    for kind, (plain, replayed, obstacle) in zip(runtimes, found, strict=True):
        assert obstacle is None, kind
        difference = compare(replayed, plain)
        # cuDNN's backward adds up in any order.
        bound = 1e-3 if kind == "cudnn" else 0.0
        assert difference.loss <= bound, (kind, difference)
        assert difference.weight[0] <= bound * 10, (kind, difference)


def test_replayed_steps_have_the_same_bits(tmp_path):
    require_same_bits(tmp_path, {}, 1, RUNTIMES)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_replayed_steps_of_two_processes_have_the_same_bits(tmp_path, name):
    """And their process groups end, which they do only after the graphs."""
    require_same_bits(tmp_path, LAYOUTS[name], 2, {"plain": PLAIN})
