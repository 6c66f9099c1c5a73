"""Loss, gradients, gradient norm and updated weights are the same in every layout.

Each case trains a small model on its layout and on one rank, through the real training parts, on
two corpora in unlike shares: 10 steps in float64, of which the last 5 have samples twice as long
and another blend and everything must agree to 1e-9, and 2 in fp32, where loss and norm must agree
to 1e-5. ``make test`` runs a few cases, ``make test-layouts`` all of them.
"""

import functools
import math
import tempfile
from pathlib import Path

import pytest

from lib.config.data_section import DataSection
from lib.config.operation import CheckpointConfig, RuntimeConfig
from lib.config.run_config import Params, RunConfig, resolve
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.train.comparison import compare, run_layout, with_layout
from lib.train.random_tokens import describe_tokens, random_corpus
from tests.layouts.matrix import GRIDS, Case, matrix

VOCABULARY = 61
FLOAT64_STEPS, FP32_STEPS = 10, 2
CASES = matrix()
# One case for each grid of up to 4 ranks, and one with all three kinds of parallelism.
FEW = [
    case for case in CASES[: len(GRIDS)] if math.prod(case.grid) in (2, 4) or case.grid == (2, 2, 2)
]

STYLES = {
    "gpt2": {},
    "llama": {
        "bias": False,
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
    },
}
STYLES["qwen"] = STYLES["llama"] | {"qkv_bias": True, "qk_norm": True}


@functools.cache
def corpora():
    folder = tempfile.TemporaryDirectory(prefix="test-layouts-")
    manifests = {
        name: random_corpus(Path(folder.name) / name, VOCABULARY, 60, seed)
        for seed, name in enumerate(("one", "two"))
    }
    return folder, manifests


def model_of(case: Case) -> ModelSection:
    """The smallest model that the layout can hold, two heads a rank."""
    tensor, pipeline, _ = case.grid
    heads = 2 * tensor
    return ModelSection(
        num_layers=pipeline * case.chunks + 1,
        hidden_size=24,
        num_attention_heads=heads,
        num_query_groups={"all": heads, "half": tensor, "one": 1}[case.kv_heads],
        head_dim=4,
        ffn_hidden_size=8 * tensor,
        vocab_size_multiple=4 * tensor,
        tie_embeddings=case.tied,
        init_std=0.1,
        **STYLES[case.style],
    )


def parallel_of(case: Case) -> ParallelConfig:
    tensor, pipeline, data = case.grid
    layers = None
    if case.split == "odd":  # one layer each, two on the second chunk
        layers = [1] * (pipeline * case.chunks)
        layers[1] += 1
    return ParallelConfig(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        sequence=case.sequence,
        virtual_stages=case.chunks,
        layers_per_chunk=None if layers is None else tuple(layers),
        sharding=case.sharding,
        data_shard=data // 2 if case.replicas else None,
    )


def micro_batches_of(case: Case) -> int:
    _, pipeline, _ = case.grid
    if case.micro_batches == "many":
        return pipeline + 1
    return max(1, pipeline - 1)


def data_of(case: Case, half_way: int, seq_length: int) -> DataSection:
    rules = {}
    if case.documents == "apart":
        rules = {"eod_in_loss": False, "positions": "document", "attention": "document"}
    later = {"from_samples": half_way, "seq_length": 2 * seq_length, "blend": {"one": 1, "two": 5}}
    return DataSection.model_validate({"blend": {"one": 2, "two": 1}, "phases": (later,)} | rules)


def config_of(case: Case, compute: str) -> RunConfig:
    tensor, _, data = case.grid
    training = TrainingSection(
        seq_length=2 * tensor if tensor > 2 else 8,
        micro_batch_size=1,
        global_batch_size=data * micro_batches_of(case),
        train_iters=FLOAT64_STEPS,
        split="90,5,5",
        z_loss=1e-3,
        label_smoothing=0.1,
    )
    params = Params(
        model_of(case),
        PrecisionConfig(compute=compute),
        ParallelConfig(),
        OptimizerConfig(lr=1e-2, clip_grad=0.5),
        ScheduleSection(warmup_iters=2),
        training,
        CheckpointConfig(),
        data_of(case, FLOAT64_STEPS // 2 * training.global_batch_size, training.seq_length),
        ("one", "two"),
    )
    return resolve(params, describe_tokens(corpora()[1], params))


def runtime_of(case: Case) -> RuntimeConfig:
    mode = "full" if case.recompute in ("uniform", "block") else case.recompute
    method = case.recompute if mode == "full" else "uniform"
    return RuntimeConfig(recompute=mode, recompute_method=method)


@functools.cache
def on_one_rank(config_text: str, steps: int):
    return run_layout(RunConfig.model_validate_json(config_text), RuntimeConfig(), 1, steps)


def difference(case: Case, compute: str, steps: int):
    config = config_of(case, compute)
    tensor, pipeline, data = case.grid
    laid_out = with_layout(config, parallel_of(case))
    outcome = run_layout(laid_out, runtime_of(case), tensor * pipeline * data, steps)
    return compare(outcome, on_one_rank(config.to_json(), steps))


def check(case: Case) -> None:
    exact = difference(case, "fp64", FLOAT64_STEPS)
    assert exact.worst() < 1e-9, exact
    rounded = difference(case, "fp32", FP32_STEPS)
    assert rounded.loss < 1e-5, rounded
    assert rounded.norm < 1e-5, rounded


def test_the_matrix_has_every_grid_and_every_pair():
    assert {case.grid for case in CASES} == set(GRIDS)
    assert len(GRIDS) == 38
    assert len(CASES) == len(set(CASES))
    assert {case.grid for case in FEW} >= {(1, 1, 4), (1, 4, 1), (4, 1, 1), (2, 2, 2)}
    interleaved = [case for case in CASES if case.chunks == 2]
    assert {case.grid[1] for case in interleaved} == {2, 3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_layout_gives_the_result_of_one_rank(case):
    check(case)


@pytest.mark.layouts
@pytest.mark.parametrize("case", [case for case in CASES if case not in FEW], ids=str)
def test_every_layout_gives_the_result_of_one_rank(case):
    check(case)
