"""The fields of the ``model`` section to and from Hugging Face's config.json.

Four families: GPT-2, Llama, Qwen2 and Qwen3 (``lib.config.export_rules`` says which model is
which). Every field that changes the mathematics is carried. One that the other side cannot
express is refused by its name, in both directions, and so is a field of config.json that is not
known here: it might change the mathematics. A field absent from config.json has the default of
their configuration class.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from lib.config.export_rules import TITLES, Family, family_of, obstacles
from lib.config.schema import ModelConfig
from lib.errors import UserError

Config = Mapping[str, object]

# Fields that change no number of the forward pass: of the file, of generation, of fine-tuning.
_WITHOUT_EFFECT = frozenset(
    """
    architectures bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    is_decoder is_encoder_decoder label2id length_penalty max_length max_window_layers min_length
    model_type n_ctx name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values reorder_and_upcast_attn
    repetition_penalty return_dict return_dict_in_generate sep_token_id sliding_window
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    use_bfloat16 use_cache
    """.split()  # noqa: SIM905  (a list would take 70 lines)
)
_ARCHITECTURES: dict[Family, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_from_fields(model: ModelConfig, vocab_size: int) -> dict[str, object]:
    """The contents of config.json for a model.

    Raises:
        UserError: names the field that its family cannot express.
    """
    if problems := obstacles(model):
        raise UserError(str(problems[0]))
    family = family_of(model)
    shared = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        # Their defaults are ids of their own vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return shared | (_gpt2_config(model) if family == "gpt2" else _rope_config(model, family))


def _gpt2_config(model: ModelConfig) -> dict[str, object]:
    return {
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
    }


def _rope_config(model: ModelConfig, family: Family) -> dict[str, object]:
    config: dict[str, object] = {
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
        "attention_dropout": model.attention_dropout,
    }
    if family == "llama":
        return config | {"attention_bias": model.bias, "mlp_bias": model.bias}
    config |= {"use_sliding_window": False, "sliding_window": None}
    return config | ({"attention_bias": False} if family == "qwen3" else {})


def fields_from_config(config: Config) -> tuple[dict[str, object], int]:
    """The fields of the ``model`` section, none of them null, and the vocabulary's size.

    Raises:
        UserError: names the field of config.json that this project cannot express.
    """
    kind = config.get("model_type")
    family: Family | None = next((name for name in TITLES if name == kind), None)
    if family is None:
        raise UserError(
            f"config.json: model_type = {kind!r}: only {', '.join(TITLES)} can be converted"
        )
    reader = _Reader(config)
    fields = _gpt2_fields(reader) if family == "gpt2" else _rope_fields(reader, family)
    vocab_size = reader.integer("vocab_size")
    reader.refuse_unknown()
    try:
        ModelConfig.model_validate(fields, strict=True)
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
        raise UserError(
            f"config.json: the value {error['input']!r} for model.{error['loc'][0]}: {error['msg']}"
        ) from None
    return fields, vocab_size


def _gpt2_fields(config: "_Reader") -> dict[str, object]:
    config.require("activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    config.require("scale_attn_weights", (True,))
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        config.require(name, (False,))
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    if hidden % heads:
        raise UserError(f"config.json: n_embd = {hidden} is no multiple of n_head = {heads}")
    dropout = config.number("resid_pdrop", 0.1)
    config.require("embd_pdrop", (dropout,), default=0.1)
    return {
        "num_layers": config.integer("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": config.integer("n_inner", 4 * hidden),
        "max_position_embeddings": config.integer("n_positions"),
        "position_embedding": "learned",
        "normalization": "layernorm",
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "bias": True,
        "qkv_bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "attention_dropout": config.number("attn_pdrop", 0.1),
        "hidden_dropout": dropout,
        "init_std": config.number("initializer_range", 0.02),
    }


def _rope_fields(config: "_Reader", family: Family) -> dict[str, object]:
    config.require("hidden_act", ("silu",))
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    # Where the field is absent; null means "as many as heads" for all of them.
    groups = config.integer("num_key_value_heads", heads, heads if family == "llama" else 32)
    if heads % groups:
        raise UserError(
            f"config.json: num_key_value_heads = {groups} does not divide num_attention_heads = "
            f"{heads}"
        )
    bias = _bias(config, family)
    return {
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": config.integer("head_dim", 128 if family == "qwen3" else hidden // heads),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "position_embedding": "rope",
        "rope_theta": _rope_theta(config),
        "normalization": "rmsnorm",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": bias,
        "qkv_bias": bias or family == "qwen2",
        "qk_norm": family == "qwen3",
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "attention_dropout": config.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_std": config.number("initializer_range", 0.02),
    }


def _bias(config: "_Reader", family: Family) -> object:
    """Whether all linear layers have biases; refuses what sets the Qwen families apart from us."""
    if family == "llama":
        bias = config.get("attention_bias", False)
        config.require("mlp_bias", (bias,), default=False)
        return bias
    config.require("use_sliding_window", (False,))
    config.require("use_mrope", (False,))
    layers = config.get("layer_types", None)
    if layers is not None and (not isinstance(layers, list) or set(layers) != {"full_attention"}):
        raise UserError(
            f"config.json: layer_types = {layers}: only full_attention in every layer can be "
            "converted, no sliding windows"
        )
    if family == "qwen3":
        config.require("attention_bias", (False,))
    return False


def _rope_theta(config: "_Reader") -> float:
    """The base of the rotary wavelengths, from where either generation of files keeps it."""
    found = [config.get("rope_theta", None)]
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name, None)
        if rope is None:
            continue
        if not isinstance(rope, dict) or not _is_plain(rope):
            raise UserError(
                f"config.json: {name} = {rope}: scaled, partial or layered rotary positions "
                "cannot be converted; take a model without them"
            )
        found.append(rope.get("rope_theta"))
    config.require("partial_rotary_factor", (1.0, None))
    given = [theta for theta in found if theta is not None]
    theta = given[0] if given else 10000.0
    if not isinstance(theta, int | float) or any(other != theta for other in given):
        raise UserError(f"config.json: rope_theta = {given}: expected one number")
    return float(theta)


def _is_plain(rope: Config) -> bool:
    """Whether these are rotary positions with a base and nothing else."""
    wanted = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    others = {name: value for name, value in rope.items() if name != "rope_theta"}
    return all(wanted.get(name, "none") == value for name, value in others.items())


class _Reader:
    """Reads config.json and remembers which fields were asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.asked: set[str] = set()

    def get(self, name: str, default: object) -> object:
        """A field, or the default where it is absent."""
        self.asked.add(name)
        return self.config.get(name, default)

    def require(self, name: str, allowed: tuple[object, ...], default: object = None) -> None:
        """Refuses a field that is there (or by default) with a value that we cannot express."""
        value = self.get(name, allowed[0] if default is None else default)
        if value not in allowed:
            raise UserError(
                f"config.json: {name} = {value!r}, only {' or '.join(map(repr, allowed))} can be "
                "converted; take a model without it"
            )

    def integer(self, name: str, null: int | None = None, absent: int | None = None) -> int:
        """A whole number above 0; ``null`` stands in for null, and ``absent`` where it lacks."""
        value = self.get(name, null if absent is None else absent)
        value = null if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"config.json: {name} = {value!r}, expected a whole number above 0")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"config.json: {name} = {value!r}, expected a number")
        return float(value)

    def refuse_unknown(self) -> None:
        """Refuses fields whose effect nobody knows here; those that begin with _ are notes."""
        unknown = set(self.config) - self.asked - _WITHOUT_EFFECT
        names = sorted(name for name in unknown if not name.startswith("_"))
        if names:
            raise UserError(
                f"config.json: {names[0]} = {self.config[names[0]]!r}: a field that is not known "
                "here and might change what the model computes; remove it if it does not"
            )
