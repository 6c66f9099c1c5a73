"""The run configuration: nulls resolved, derived numbers, its file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib.config.run_config import RunConfig, count_parameters, padded_size, resolve, resolve_model
from lib.config.schema import ModelSection
from lib.errors import UserError
from tests.config.conftest import Factory


def test_nulls_of_the_model_are_resolved(make: Factory) -> None:
    model = make.run_config().model
    assert model.num_query_groups == 4
    assert model.head_dim == 8
    assert model.ffn_hidden_size == 128
    assert model.max_position_embeddings == 16
    assert model.qkv_bias is True


def test_what_is_written_is_kept(make: Factory) -> None:
    keys = {
        "num_query_groups": 2,
        "head_dim": 6,
        "ffn_hidden_size": 48,
        "max_position_embeddings": 99,
        "bias": False,
        "qkv_bias": True,
    }
    model = make.run_config(model=keys).model
    assert {key: getattr(model, key) for key in keys} == keys


@pytest.mark.parametrize(
    ("hidden", "expected"), [(192, 512), (2048, 5504), (24, 64), (4096, 10944), (768, 2048)]
)
def test_swiglu_width_is_eight_thirds_rounded_up_to_64(hidden: int, expected: int) -> None:
    section = ModelSection(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, activation="swiglu"
    )
    assert resolve_model(section, 8).ffn_hidden_size == expected


def test_lengths_are_in_samples(make: Factory) -> None:
    run = make.run_config(schedule={"warmup_iters": 2, "decay_iters": 9})
    assert (run.training.train_iters, run.training.train_samples) == (10, 80)
    assert run.schedule.warmup_samples == 16
    assert run.schedule.decay_samples == 72
    assert run.schedule.wsd_decay_samples == 0
    run = make.run_config(
        training={"train_iters": None, "train_samples": 64},
        schedule={"decay": "wsd", "warmup_samples": 3, "wsd_decay_samples": 7},
    )
    assert (run.training.train_iters, run.training.train_samples) == (8, 64)
    assert run.schedule.model_dump() == {
        "decay": "wsd",
        "min_lr": 0.0,
        "wsd_style": "linear",
        "warmup_samples": 3,
        "decay_samples": 64,
        "wsd_decay_samples": 7,
    }


def test_iterations_and_samples_give_the_same_run(make: Factory) -> None:
    by_iterations = make.run_config(schedule={"warmup_iters": 2, "decay_iters": 9})
    by_samples = make.run_config(
        training={"train_iters": None, "train_samples": 80},
        schedule={"warmup_samples": 16, "decay_samples": 72},
    )
    assert by_iterations == by_samples


RAMPUP = {
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "rampup_start_batch_size": 2,
    "rampup_increment": 2,
    "rampup_samples": 24,
    "train_iters": None,
}


def test_a_rampup_takes_more_steps(make: Factory) -> None:
    """Steps of 2, 2, 2, 2, 4, 4, 6, 6, 8 and 8 samples."""
    run = make.run_config(training={**RAMPUP, "train_samples": 44}, schedule={"warmup_samples": 9})
    assert (run.training.train_iters, run.training.train_samples) == (10, 44)
    assert run.schedule.warmup_samples == 9
    assert run.schedule.decay_samples == 44
    assert run.derived.tokens_per_step == 8 * 16
    assert run.derived.train_tokens == 44 * 16
    assert run.derived.epochs == 44 / 40


def blended(make: Factory, corpora: tuple[str, ...] = ("web", "code"), **data: Any) -> RunConfig:
    """80 samples of two corpora with 62 and 31 training samples of 16 tokens."""
    known = {"web": make.corpus("web", 1000, 50, 50), "code": make.corpus("code", 500, 50, 50)}
    params = replace(make.params(data=data), corpora=corpora)
    return resolve(params, make.facts(corpora=known))


def test_a_blend_by_size_reads_all_equally_often(make: Factory) -> None:
    run = blended(make)
    assert run.data.phases[0].weights == {"code": 31.0, "web": 62.0}
    assert run.data.validation == run.data.trained == ("code", "web")
    assert run.data.passes(80) == {"code": 80 / 93, "web": 80 / 93}
    assert run.derived.epochs == 80 / 93


def test_what_is_not_in_the_blend_is_not_trained_on(make: Factory) -> None:
    run = blended(make, blend={"web": 3}, validation=["code"])
    assert run.data.phases[0].weights == {"web": 3.0}
    assert (run.data.trained, run.data.validation) == (("web",), ("code",))
    assert list(run.data.corpora) == ["code", "web"]
    run = blended(make, corpora=("web",))
    assert list(run.data.corpora) == ["web"]


def test_phases_take_over_what_they_do_not_say(make: Factory) -> None:
    phases = [
        {"from_samples": 24, "seq_length": 32},
        {"from_samples": 48, "blend": {"web": 1, "code": 1}, "micro_batch_size": 1},
        {"from_samples": 64, "seq_length": 64, "blend": {"code": 2}},
    ]
    run = blended(make, blend={"web": 1}, phases=phases)
    told = [(p.from_samples, p.seq_length, p.micro_batch_size) for p in run.data.phases]
    assert told == [(0, 16, 2), (24, 32, 2), (48, 32, 1), (64, 64, 1)]
    weights = [tuple(phase.weights.values()) for phase in run.data.phases]
    assert weights == [(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (2.0, 0.0)]  # code, web
    assert [phase.samples["web"] for phase in run.data.phases] == [62, 31, 31, 15]
    assert run.derived.train_tokens == 24 * 16 + 24 * 32 + 16 * 32 + 16 * 64
    assert run.data.tokens_before(50) == 24 * 16 + 26 * 32
    assert run.data.passes(80) == pytest.approx({"code": 59.2 / 21, "web": 44 / 31})
    assert run.longest_seq_length == run.model.max_position_embeddings == 64
    assert [run.data.phase_index_at(n) for n in (0, 23, 24, 47, 64, 10**9)] == [0, 0, 1, 1, 3, 3]
    assert run.phase_at(63) == run.data.phases[2]
    assert run.before_phase(2).data.phases == run.data.phases[:2]


def test_the_order_of_corpora_in_the_file_decides_nothing(make: Factory, tmp_path: Path) -> None:
    one = blended(make, blend={"web": 1, "code": 2})
    two = blended(make, corpora=("code", "web"), blend={"code": 2, "web": 1})
    assert one == two
    assert one.to_json() == two.to_json()
    path = tmp_path / "run_config.json"
    path.write_text(one.to_json())
    for run in (one, two, RunConfig.load(path)):
        assert list(run.data.corpora) == list(run.data.phases[0].weights) == ["code", "web"]
        assert list(run.data.phases[0].samples) == ["code", "web"]


def test_layouts_and_scales_are_kept_as_written(make: Factory, tmp_path: Path) -> None:
    layout = {
        "tensor": 2,
        "pipeline": 2,
        "layers_per_chunk": [1, 1],
        "sharding": "parameters",
        "data_shard": 2,
    }
    run = make.run_config(parallel=layout)
    path = tmp_path / "run_config.json"
    path.write_text(run.to_json())
    assert RunConfig.load(path) == run
    assert run.parallel.layers_per_chunk == (1, 1)
    assert make.run_config().parallel.layers_per_chunk is None


def test_derived_numbers(make: Factory) -> None:
    derived = make.run_config().derived
    assert derived.padded_vocab_size == 384
    assert derived.tokens_per_step == 128
    assert derived.train_tokens == 1280
    assert derived.epochs == 2.0


@pytest.mark.parametrize(
    ("size", "multiple", "padded"),
    [(301, 128, 384), (384, 128, 384), (1, 128, 128), (65500, 1, 65500), (50257, 128, 50304)],
)
def test_padding(size: int, multiple: int, padded: int) -> None:
    assert padded_size(size, multiple) == padded


LLAMA = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}
PUBLISHED = {
    # Numbers of weights that the models' own checkpoints have.
    "gpt2": (
        {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
        1024,
        50257,
        124_439_808,
    ),
    "gpt2-xl": (
        {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25},
        1024,
        50257,
        1_557_611_200,
    ),
    "llama-2-7b": (
        {
            **LLAMA,
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "ffn_hidden_size": 11008,
            "tie_embeddings": False,
        },
        4096,
        32000,
        6_738_415_616,
    ),
    "llama-3-8b": (
        {
            **LLAMA,
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "ffn_hidden_size": 14336,
            "tie_embeddings": False,
        },
        8192,
        128256,
        8_030_261_248,
    ),
    "qwen2-0.5b": (
        {
            **LLAMA,
            "num_layers": 24,
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_query_groups": 2,
            "ffn_hidden_size": 4864,
            "qkv_bias": True,
        },
        4096,
        151936,
        494_032_768,
    ),
    "qwen3-0.6b": (
        {
            **LLAMA,
            "num_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_query_groups": 8,
            "head_dim": 128,
            "ffn_hidden_size": 3072,
            "qk_norm": True,
        },
        4096,
        151936,
        596_049_920,
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_of_published_models(name: str) -> None:
    keys, positions, vocab_size, expected = PUBLISHED[name]
    model = resolve_model(ModelSection.model_validate(keys), positions)
    assert count_parameters(model, vocab_size) == expected


def test_the_file_is_deterministic_and_complete(make: Factory, tmp_path: Path) -> None:
    run = make.run_config()
    text = run.to_json()
    assert text == make.run_config().to_json()
    assert text.endswith("}\n")
    content: dict[str, Any] = json.loads(text)
    assert list(content) == sorted(content)
    assert set(content) == {
        "model", "precision", "parallel", "optimizer", "schedule", "training", "checkpoint",
        "data", "derived", "initial",
    }  # fmt: skip
    assert content["data"]["corpora"]["stdlib"]["splits"]["train"] == {
        "documents": [0, 90],
        "tokens": 641,
        "samples": 40,
    }
    path = tmp_path / "run_config.json"
    path.write_text(text)
    assert RunConfig.load(path) == run
    assert RunConfig.load(path).to_json() == text


def test_no_null_is_left_but_those_that_mean_something(make: Factory) -> None:
    content = json.loads(make.run_config().to_json())
    nulls = [f"{s}.{key}" for s, keys in content.items() for key in keys if keys[key] is None]
    assert sorted(nulls) == [
        "checkpoint.keep_every",
        "initial.folder",
        "initial.sha256",
        "parallel.data",
        "parallel.data_shard",
        "parallel.layers_per_chunk",
        "precision.loss_scale",
        "training.rampup_increment",
        "training.rampup_samples",
        "training.rampup_start_batch_size",
    ]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": 3}'])
def test_a_file_that_is_none_of_ours(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run_config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"dvc repro validate_config") as caught:
        RunConfig.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; run: dvc repro validate_config"):
        RunConfig.load(tmp_path / "run_config.json")


def test_an_older_file_is_refused(make: Factory, tmp_path: Path) -> None:
    content = json.loads(make.run_config().to_json())
    del content["model"]["head_dim"]
    path = tmp_path / "run_config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.head_dim: Field required"):
        RunConfig.load(path)


def test_resolving_asks_for_a_length(make: Factory) -> None:
    with pytest.raises(AssertionError):
        resolve(make.params(training={"train_iters": None}), make.facts())
