"""From flags to parameters: the model, the data, and what is not written."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config.params_problems import entry_model
from lib.plan import megatron_flag_table as tables
from lib.plan.megatron_flags import Arguments, reason_without
from stages.import_megatron_args import ALL_SECTIONS
from tests.plan.launching import launch, written

# ---- all of the run is written


def test_nothing_that_decides_a_run_is_left_to_the_file_before() -> None:
    decided = ("model", "precision", "parallel", "optimizer", "schedule", "training", "data")
    fields = {
        f"{section}.{key}"
        for section in decided
        for key in entry_model(ALL_SECTIONS[section]).model_fields
    }
    # The style is read with wsd alone, and new_parts with initial weights.
    assert fields - set(launch().settings) == {"schedule.wsd_style", "training.new_parts"}


def test_defaults_are_those_of_megatron() -> None:
    found = launch()
    expected = {
        "model.attention_dropout": 0.1,
        "model.hidden_dropout": 0.1,
        "model.bias": True,
        "model.tie_embeddings": True,
        "model.position_embedding": "learned",
        "model.activation": "gelu",
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "schedule.decay": "linear",
        "schedule.min_lr": 0.0,
        "training.eval_interval": 1000,
        "training.eval_iters": 100,
        "training.split": "969,30,1",
        "precision.compute": "fp32",
        "runtime.log_interval": 100,
    }
    assert {name: found.settings[name].value for name in expected} == expected
    assert not [name for name in expected if found.settings[name].flags]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"disable-bias-linear": True}, {"model.bias": False}),
        ({"add-qkv-bias": True}, {"model.qkv_bias": True}),
        ({"qk-layernorm": True}, {"model.qk_norm": True}),
        ({"untie-embeddings-and-output-weights": True}, {"model.tie_embeddings": False}),
        ({"no-tie-embed-logits": True}, {"model.tie_embeddings": False}),
        ({"normalization": "RMSNorm", "norm-epsilon": "1e-6"},
         {"model.normalization": "rmsnorm", "model.norm_epsilon": 1e-6}),
        ({"layernorm-epsilon": "1e-6"}, {"model.norm_epsilon": 1e-6}),
        ({"use_rms_norm": True}, {"model.normalization": "rmsnorm"}),
        ({"position-embedding-type": "rope", "rotary-base": "500000"},
         {"model.position_embedding": "rope", "model.rope_theta": 500000.0}),
        ({"use-rotary-position-embeddings": True, "no-position-embedding": True},
         {"model.position_embedding": "rope"}),
        ({"group-query-attention": True, "num-query-groups": 2}, {"model.num_query_groups": 2}),
        ({"group-query-attention": True}, {"model.num_query_groups": 1}),
        ({"num-query-groups": 2}, {"model.num_query_groups": None}),
        ({"num-key-value-heads": 4}, {"model.num_query_groups": 4}),
        ({"attention-head-type": "multiquery"}, {"model.num_query_groups": 1}),
        ({"kv-channels": 64}, {"model.head_dim": 64}),
        ({"bf16": True}, {"precision.compute": "bf16"}),
        ({"fp16": True, "loss-scale": 8192, "hysteresis": 3},
         {"precision.loss_scale": 8192.0, "precision.loss_scale_hysteresis": 3}),
        ({"fp16": True, "loss-scale": 0}, {"precision.loss_scale": None}),
        ({"recompute-activations": True}, {"runtime.recompute": "selective"}),
        ({"checkpoint-activations": True, "checkpoint-num-layers": 2},
         {"runtime.recompute": "full", "runtime.recompute_layers": 2}),
        ({"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 3},
         {"runtime.recompute_method": "block", "runtime.recompute_layers": 3}),
        ({"reset-position-ids": True, "reset-attention-mask": True},
         {"data.positions": "document", "data.attention": "document"}),
        ({"attention-backend": "fused"}, {"runtime.attention": "cudnn"}),
        ({"save-interval": 50, "save-retain-interval": 500},
         {"checkpoint.save_interval": 50, "checkpoint.keep_every": 500}),
        ({"data-parallel-sharding-strategy": "optim_grads_params"},
         {"parallel.sharding": "parameters"}),
        ({"zero-stage": 2}, {"parallel.sharding": "gradients"}),
        ({"use-torch-fsdp2": True}, {"parallel.sharding": "parameters"}),
        ({"seed": 7, "init-method-std": 0.01, "make-vocab-size-divisible-by": 64},
         {"training.seed": 7, "model.init_std": 0.01, "model.vocab_size_multiple": 64}),
        ({"sequence-parallel": True}, {"parallel.sequence": False}),
        ({"sequence-parallel": True, "tensor-model-parallel-size": 2},
         {"parallel.sequence": True, "parallel.tensor": 2}),
    ],
)  # fmt: skip
def test_flags_set_their_fields(flags: dict[str, object], expected: dict[str, object]) -> None:
    found = launch(launcher="torchrun --nproc_per_node 2", **flags)
    assert {name: found.settings[name].value for name in expected} == expected
    assert not found.problems


@given(st.integers(1, 20000))
def test_the_width_of_swiglu_is_megatrons(hidden: int) -> None:
    found = launch(**{"hidden-size": hidden, "swiglu": True})
    assert written(found, "model.ffn_hidden_size") == [int((4 * hidden * 2 / 3) / 64) * 64]
    assert written(launch(swiglu=True, ffn_hidden_size=7), "model.ffn_hidden_size") == [7]


# ---- data and tokenizer


def test_pairs_get_names_and_weights() -> None:
    paths = "0.3 /d/Web-2024_text_document 0.7 /e/web_2024_text_document 1 /d/stdlib_document"
    found = launch(**{"data-path": paths})
    assert written(found, "data.blend") == [{"web_2024": 0.3, "web_2024_2": 0.7, "stdlib_2": 1.0}]
    assert found.settings["data.imported"].value == {
        "web_2024": "/d/Web-2024_text_document",
        "web_2024_2": "/e/web_2024_text_document",
        "stdlib_2": "/d/stdlib_document",
    }


def test_a_run_that_measures_nothing_measures_nothing() -> None:
    names = ("training.eval_interval", "training.eval_iters")
    for iterations in ("0", "-1"):
        assert written(launch(**{"eval-iters": iterations}), *names) == [0, 0]
    assert written(launch(**{"eval-iters": 5, "eval-interval": 7}), *names) == [7, 5]


def test_prefixes_without_weights_are_named_as_such() -> None:
    for paths in ("a_document b_document", "a_document b_document c_document", "1 a 2"):
        found = launch(**{"data-path": paths})
        assert list(written(found, "data.blend")[0].values()) == [1.0] * len(paths.split())
        assert any("no weights" in note for note in found.notes)
    assert not any("no weights" in note for note in launch().notes)


def test_files_of_their_own_for_each_purpose() -> None:
    more = {"train-data-path": "2 a 1 b", "valid-data-path": "c", "test-data-path": "d"}
    found = launch("data-path", **more)
    assert written(found, "data.blend", "data.validation", "training.split") == [
        {"a": 2.0, "b": 1.0}, ["c"], "100,0,0"
    ]  # fmt: skip
    assert [each.flag for each in found.without] == ["--test-data-path d"]


@pytest.mark.parametrize(
    ("flags", "kind", "path"),
    [
        ({}, "gpt2", None),
        ({"tokenizer-type": "GPT2BPETokenizer"}, "gpt2", None),
        ({"tokenizer-type": "Llama2Tokenizer", "tokenizer-model": "t.model"}, "sentencepiece",
         "t.model"),
        ({"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "hf/"}, "tokenizer_json",
         "hf/tokenizer.json"),
        ({"tokenizer-type": "TokenizerFromFile", "tokenizer-file": "x.json"}, "tokenizer_json",
         "x.json"),
    ],
)  # fmt: skip
def test_tokenizers(flags: dict[str, object], kind: str, path: str | None) -> None:
    found = launch(**flags)
    assert written(found, "tokenizer.kind", "tokenizer.path") == [kind, path]
    files = ["v.json", "m.txt"] if kind == "gpt2" else [None, None]
    assert written(found, "tokenizer.vocab_file", "tokenizer.merges_file") == files


def test_files_of_another_tokenizer_are_named_as_such() -> None:
    files = "--vocab-file v.json", "--merge-file m.txt"
    found = launch(**{"tokenizer-type": "HFTokenizer", "tokenizer-model": "t.json"})
    assert {each.flag for each in found.without} == set(files)
    assert not any(each.changes_result for each in found.without)
    found = launch(**{"tokenizer-model": "t.json"})
    assert [each.flag for each in found.without] == ["--tokenizer-model t.json"]
    found = launch(**{"tokenizer-type": "NullTokenizer"})
    assert {each.flag for each in found.without} == {*files, "--tokenizer-type NullTokenizer"}
    assert not found.problems


# ---- what is not written


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({"num-experts": 8}, True),
        ({"position-embedding-type": "alibi"}, True),
        ({"rotary-percent": 0.5}, True),
        ({"optimizer": "sgd"}, True),
        ({"lr-decay-style": "inverse-square-root"}, True),
        ({"eod-mask-loss": True}, True),
        ({"glu-activation": "geglu"}, True),
        ({"tensorboard-dir": "x"}, False),
        ({"overlap-grad-reduce": True}, False),
        ({"loss-scale": 8, "bf16": True}, False),
    ],
)
def test_flags_without_a_counterpart_say_whether_it_matters(
    flags: dict[str, object], changes: bool
) -> None:
    found = launch(**flags)
    name = next(iter(flags))
    (entry,) = [each for each in found.without if each.flag.startswith(f"--{name}")]
    assert entry.changes_result is changes
    assert entry.why
    assert not found.problems


@pytest.mark.parametrize("kind", ["adam", "adamw", "fusedadamw"])
def test_adam_of_any_name_is_adam(kind: str) -> None:
    found = launch(optimizer=kind)
    assert list(found.agreed) == [f"--optimizer {kind}"]
    assert not found.without


@pytest.mark.parametrize("flag", ["rotary-base", "rotary-theta", "rope_theta"])
def test_the_base_of_the_angles_has_had_many_names(flag: str) -> None:
    assert written(launch(**{flag: 7e5}), "model.rope_theta") == [7e5]


def test_unknown_flags_are_named_with_what_they_may_mean() -> None:
    found = launch(**{"num-layer": 3, "frobnicate": True})
    assert found.unknown["--num-layer 3"][0] == "--num-layers"
    assert "--frobnicate" in found.unknown
    assert not found.problems


def test_old_flags_have_their_modern_names() -> None:
    found = launch("micro-batch-size", **{"batch-size": 2, "DDP-impl": "local", "warmup": 0.01})
    assert found.renamed == {
        "--batch-size 2": "--micro-batch-size",
        "--DDP-impl local": "none: there is one implementation",
        "--warmup 0.01": "--lr-warmup-fraction",
    }
    assert written(found, "schedule.warmup_iters") == [10]
    assert not found.unknown


def test_variables_of_flags_that_nobody_knows_are_named() -> None:
    found = launch(bf16="$EXTRA_ARGS")
    assert "$EXTRA_ARGS after --bf16" in found.unknown_values


def test_every_flag_ends_in_one_list() -> None:
    flags = {"num-experts": 8, "frob": 1, "data-impl": "mmap", "optimizer": "adam", "bf16": True}
    found = launch(**flags)
    lists = {flag for setting in found.mapped for flag in setting.flags} | set(found.agreed)
    lists |= {each.flag for each in found.without} | set(found.renamed) | set(found.unknown)
    assert set(found.flags) == lists


# ---- the tables


NAMES = [
    name
    for table in (tables.CHANGES_RESULT, tables.CHANGES_NOTHING)
    for names in table.values()
    for name in names.split()
]


def test_names_in_the_tables_are_spelled_as_flags_are_looked_up() -> None:
    for name in (*NAMES, *tables.RENAMED):
        assert re.fullmatch(r"\*?[a-z0-9-]+\*?", name), name
    assert len(NAMES) == len(set(NAMES)), "a flag with two reasons"


def test_a_modern_name_is_a_known_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    has = Arguments.has
    monkeypatch.setattr(Arguments, "has", lambda self, name: (asked.add(name), has(self, name))[1])
    launch(**{"tokenizer-type": "HFTokenizer", "data-parallel-sharding-strategy": "optim"})
    launch(**{"group-query-attention": True, "lr-decay-style": "WSD"})
    for old, new in tables.RENAMED.items():
        for name in re.findall(r"--([a-z0-9_-]+)", new):
            name = name.replace("_", "-")
            is_other = "tools/" in new
            assert is_other or name in asked or reason_without(name), f"{old}: {name}"
