"""Which family of Hugging Face's models a model belongs to, and what no family can express.

    learned positions                          gpt2
    rope, qk_norm                              qwen3
    rope, qkv_bias without the other biases    qwen2
    rope, anything else                        llama

Kept apart from the conversion, which needs torch: validate_config asks before training, so that
no one learns after days of it that the model cannot be exported.
"""

from collections.abc import Iterator
from typing import Literal

from lib.config.nearest import multiples_near
from lib.config.operation import ExportConfig
from lib.config.params_problems import show
from lib.config.run_config import resolve_model
from lib.config.schema import ModelConfig, ModelSection, TrainingSection
from lib.errors import Problem

Family = Literal["gpt2", "llama", "qwen2", "qwen3"]

TITLES: dict[Family, str] = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}


def family_of(model: ModelConfig) -> Family:
    """The family that comes nearest; ``obstacles`` says what it cannot express."""
    if model.position_embedding == "learned":
        return "gpt2"
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.qkv_bias and not model.bias else "llama"


def obstacles(model: ModelConfig) -> list[Problem]:
    """Each field of a model that its family at Hugging Face cannot express.

    Source: the classes ``configuration_*`` and ``modeling_*`` of transformers 4.48 to 5.
    """
    family = family_of(model)
    basis = f"model.position_embedding = {model.position_embedding}"
    if family == "qwen3":
        basis += " and model.qk_norm"
    problems = [
        Problem(
            f"model.{name}",
            show(getattr(model, name)),
            f"Hugging Face's {TITLES[family]} (for {basis}) can only express {show(wanted)}",
            f"write {show(wanted)}, or export.format: none",
        )
        for name, wanted in _wanted(model, family).items()
        if getattr(model, name) != wanted
    ]
    hidden, heads = model.hidden_size, model.num_attention_heads
    if family in ("gpt2", "llama") and hidden % heads:
        problems.append(
            Problem(
                "model.hidden_size",
                str(hidden),
                f"Hugging Face's {TITLES[family]} takes multiples of model.num_attention_heads = "
                f"{heads} only",
                f"nearest: {multiples_near(hidden, heads)}; or export.format: none",
            )
        )
    return problems


def _wanted(model: ModelConfig, family: Family) -> dict[str, object]:
    """What the family fixes, by field."""
    if family == "gpt2":
        return {
            "normalization": "layernorm",
            "activation": "gelu",
            "bias": True,
            "qkv_bias": True,
            "qk_norm": False,
            "num_query_groups": model.num_attention_heads,
            "head_dim": model.hidden_size // model.num_attention_heads,
        }
    wanted: dict[str, object] = {
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "hidden_dropout": 0.0,
    }
    if family == "llama":
        return wanted | {"qkv_bias": model.bias}
    # Qwen3 has biases on query, key, value and output together, or (as here) on none.
    return wanted | {"bias": False, "qkv_bias": family == "qwen2"}


def hugging_face_can_express_the_model(
    export: ExportConfig, model: ModelSection, training: TrainingSection
) -> Iterator[Problem]:
    """What is to be exported must exist there."""
    is_whole = model.head_dim is not None or model.hidden_size % model.num_attention_heads == 0
    if export.format == "huggingface" and is_whole:
        yield from obstacles(resolve_model(model, training.seq_length))


EXPORT_RULES = (hugging_face_can_express_the_model,)
