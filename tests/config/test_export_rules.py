"""Models that Hugging Face has no class for are refused before they are trained."""

from typing import Any

import pytest

from lib.config.export_rules import family_of, hugging_face_can_express_the_model, obstacles
from lib.config.operation import ExportConfig
from lib.config.rules import broken_rules
from lib.config.run_config import resolve_model
from lib.errors import Problem
from tests.config.sections import model, only, training

LLAMA = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}


def found(export: str = "huggingface", **keys: Any) -> list[Problem]:
    section = ExportConfig.model_validate({"format": export})
    return list(hugging_face_can_express_the_model(section, model(**keys), training()))


@pytest.mark.parametrize(
    ("keys", "family"),
    [
        ({}, "gpt2"),
        ({"tie_embeddings": False, "hidden_dropout": 0.1, "ffn_hidden_size": 20}, "gpt2"),
        (LLAMA, "llama"),
        (LLAMA | {"bias": True}, "llama"),
        (LLAMA | {"head_dim": 6, "num_query_groups": 1}, "llama"),
        (LLAMA | {"qkv_bias": True}, "qwen2"),
        (LLAMA | {"qk_norm": True, "head_dim": 10, "num_attention_heads": 6}, "qwen3"),
    ],
)
def test_families(keys: dict[str, Any], family: str) -> None:
    assert found(**keys) == []
    assert family_of(resolve_model(model(**keys), 16)) == family


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"qk_norm": True}, ["qk_norm"]),
        ({"bias": False}, ["bias", "qkv_bias"]),
        ({"num_query_groups": 2}, ["num_query_groups"]),
        ({"head_dim": 16}, ["head_dim"]),
        ({"normalization": "rmsnorm", "activation": "swiglu"}, ["normalization", "activation"]),
        ({"position_embedding": "rope", "bias": False}, ["normalization", "activation"]),
        (LLAMA | {"hidden_dropout": 0.1}, ["hidden_dropout"]),
        (LLAMA | {"bias": True, "qkv_bias": False}, ["qkv_bias"]),
        (LLAMA | {"qk_norm": True, "qkv_bias": True}, ["qkv_bias"]),
        (LLAMA | {"qk_norm": True, "bias": True}, ["bias", "qkv_bias"]),
        (LLAMA | {"num_attention_heads": 3, "head_dim": 4}, ["hidden_size"]),
    ],
)
def test_what_no_family_expresses(keys: dict[str, Any], fields: list[str]) -> None:
    assert [problem.field for problem in found(**keys)] == [f"model.{name}" for name in fields]
    assert found(export="none", **keys) == []
    assert obstacles(resolve_model(model(**keys), 16)) == found(**keys)


def test_both_remedies_are_named() -> None:
    assert only(iter(found(qk_norm=True))) == (
        "model.qk_norm = true: Hugging Face's GPT-2 (for model.position_embedding = learned) can "
        "only express false; write false, or export.format: none"
    )
    assert only(iter(found(**LLAMA, num_attention_heads=3, head_dim=4))).endswith(
        "nearest: 30 or 33; or export.format: none"
    )


def test_the_rule_is_run_and_leaves_other_mistakes_to_theirs() -> None:
    sections = {"export": ExportConfig(), "model": model(qk_norm=True), "training": training()}
    assert [problem.field for problem in broken_rules(sections)] == ["model.qk_norm"]
    assert found(num_attention_heads=3) == []  # does not divide hidden_size
