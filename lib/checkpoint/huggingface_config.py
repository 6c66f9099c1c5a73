"""The fields of the ``model`` section to and from Hugging Face's config.json: GPT-2 and Llama.

Every field that changes the mathematics is carried. One that the other side cannot express is
refused by its name, in both directions; a field absent from config.json has the default of their
configuration class.
"""

from collections.abc import Mapping

from lib.config.schema import ModelConfig
from lib.errors import UserError


def config_from_fields(model: ModelConfig, vocab_size: int) -> dict[str, object]:
    """The contents of config.json for a model.

    Raises:
        UserError: names the field that neither GPT-2 nor Llama can express.
    """
    if model.position_embedding == "learned":
        return _gpt2_config(model, vocab_size)
    return _llama_config(model, vocab_size)


def fields_from_config(config: Mapping[str, object]) -> tuple[dict[str, object], int]:
    """The fields of the ``model`` section, none of them null, and the vocabulary's size.

    Raises:
        UserError: names the field of config.json that this project cannot express.
    """
    kind = config.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"model_type = {kind!r}: only gpt2 and llama can be converted")
    fields = _gpt2_fields(config) if kind == "gpt2" else _llama_fields(config)
    return fields, _integer(config, "vocab_size")


def _gpt2_config(model: ModelConfig, vocab_size: int) -> dict[str, object]:
    _refuse_others(
        model,
        "GPT-2",
        {
            "normalization": "layernorm",
            "activation": "gelu",
            "bias": True,
            "qkv_bias": True,
            "qk_norm": False,
            "num_query_groups": model.num_attention_heads,
            "head_dim": model.hidden_size / model.num_attention_heads,
        },
    )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": "gelu_new",
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        # Their defaults are ids of their own vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_config(model: ModelConfig, vocab_size: int) -> dict[str, object]:
    _refuse_others(
        model,
        "Llama",
        {
            "normalization": "rmsnorm",
            "activation": "swiglu",
            "qkv_bias": model.bias,
            "qk_norm": False,
            "hidden_dropout": 0.0,
        },
    )
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"model.hidden_size = {model.hidden_size}: Hugging Face's Llama takes multiples of "
            f"model.num_attention_heads = {model.num_attention_heads} only"
        )
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        # The first for releases before 5, the second from 5 on.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _refuse_others(model: ModelConfig, family: str, required: Mapping[str, object]) -> None:
    """Refuses a model that the family cannot express, naming the first such field."""
    for name, value in required.items():
        found = getattr(model, name)
        if found != value:
            raise UserError(
                f"model.{name} = {found}: Hugging Face's {family} (model.position_embedding = "
                f"{model.position_embedding}) can only express {value}"
            )


def _gpt2_fields(config: Mapping[str, object]) -> dict[str, object]:
    _require(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    _require(config, "scale_attn_weights", (True,))
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        _require(config, name, (False,))
    hidden, heads = _integer(config, "n_embd"), _integer(config, "n_head")
    dropout = config.get("resid_pdrop", 0.1)
    _require(config, "embd_pdrop", (dropout,), default=0.1)
    inner = config.get("n_inner")
    return {
        "num_layers": _integer(config, "n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": 4 * hidden if inner is None else inner,
        "max_position_embeddings": _integer(config, "n_positions"),
        "position_embedding": "learned",
        "normalization": "layernorm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "bias": True,
        "qkv_bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "hidden_dropout": dropout,
        "init_std": config.get("initializer_range", 0.02),
    }


def _llama_fields(config: Mapping[str, object]) -> dict[str, object]:
    _require(config, "hidden_act", ("silu",))
    bias = config.get("attention_bias", False)
    _require(config, "mlp_bias", (bias,), default=False)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    head_dim, groups = config.get("head_dim"), config.get("num_key_value_heads")
    return {
        "num_layers": _integer(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads if groups is None else groups,
        "head_dim": hidden // heads if head_dim is None else head_dim,
        "ffn_hidden_size": _integer(config, "intermediate_size"),
        "max_position_embeddings": _integer(config, "max_position_embeddings"),
        "position_embedding": "rope",
        "rope_theta": _rope_theta(config),
        "normalization": "rmsnorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": bias,
        "qkv_bias": bias,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_std": config.get("initializer_range", 0.02),
    }


def _rope_theta(config: Mapping[str, object]) -> float:
    """The base of the rotary wavelengths, from where either generation of files keeps it."""
    found: list[object] = [config["rope_theta"]] if "rope_theta" in config else []
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        kind = "default"
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            found += [rope["rope_theta"]] if "rope_theta" in rope else []
        if not isinstance(rope, dict) or kind != "default":
            raise UserError(f"{name} = {rope}: scaled rotary positions cannot be converted")
        _require(rope, "partial_rotary_factor", (1.0,))
    _require(config, "partial_rotary_factor", (1.0,))
    theta = found[0] if found else 10000.0
    if not isinstance(theta, int | float) or any(other != theta for other in found):
        raise UserError(f"rope_theta = {found}: expected one number")
    return float(theta)


def _require(
    config: Mapping[str, object], name: str, allowed: tuple[object, ...], default: object = None
) -> None:
    """Refuses a field that is there (or by default) with a value that we cannot express."""
    value = config.get(name, allowed[0] if default is None else default)
    if value not in allowed:
        raise UserError(
            f"config.json: {name} = {value!r}, only {' or '.join(map(repr, allowed))} can be "
            "converted"
        )


def _integer(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {name} = {value!r}, expected a whole number above 0")
    return value
