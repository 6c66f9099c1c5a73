"""Names and shapes to and from Hugging Face: exact round trips, strict loading, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from lib.checkpoint.huggingface import from_huggingface, to_huggingface
from lib.checkpoint.shapes import parameter_shapes
from lib.config.schema import ModelConfig
from lib.errors import UserError

VOCABULARY = 301


def gpt2(**changes):
    fields = {
        "num_layers": 2,
        "hidden_size": 12,
        "num_attention_heads": 3,
        "num_query_groups": 3,
        "head_dim": 4,
        "ffn_hidden_size": 20,
        "max_position_embeddings": 32,
        "qkv_bias": True,
    }
    return ModelConfig.model_validate(fields | changes)


def llama(**changes):
    fields = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 6,
        "ffn_hidden_size": 24,
        "max_position_embeddings": 32,
        "position_embedding": "rope",
        "rope_theta": 500000.0,
        "normalization": "rmsnorm",
        "norm_epsilon": 1e-6,
        "activation": "swiglu",
        "bias": False,
        "qkv_bias": False,
        "tie_embeddings": False,
    }
    return ModelConfig.model_validate(fields | changes)


def qwen2(**changes):
    return llama(**{"qkv_bias": True} | changes)


def qwen3(**changes):
    return llama(**{"qk_norm": True} | changes)


def weights(model, rows=VOCABULARY):
    generator = torch.Generator().manual_seed(7)
    shapes = parameter_shapes(model, rows)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def theirs(config):
    """Their model, built from the contents of config.json."""
    built = CONFIG_MAPPING[config["model_type"]](**config)
    assert config["architectures"] == [MODEL_FOR_CAUSAL_LM_MAPPING[type(built)].__name__]
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(built)](built)


CONFIGURATIONS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(tie_embeddings=False),
    "gpt2 wide": gpt2(ffn_hidden_size=48, norm_epsilon=1e-6, hidden_dropout=0.1),
    "llama": llama(),
    "llama tied": llama(tie_embeddings=True),
    "llama one kv head": llama(num_query_groups=1),
    "llama all kv heads": llama(num_query_groups=4, head_dim=4),
    "llama with biases": llama(bias=True, qkv_bias=True, attention_dropout=0.1),
    "qwen2": qwen2(),
    "qwen2 tied, one kv head": qwen2(tie_embeddings=True, num_query_groups=1, head_dim=4),
    "qwen2 odd width": qwen2(hidden_size=18, num_query_groups=4, norm_epsilon=1e-5),
    "qwen3": qwen3(),
    "qwen3 tied, all kv heads": qwen3(tie_embeddings=True, num_query_groups=4, head_dim=4),
    "qwen3 odd width": qwen3(hidden_size=18, num_query_groups=1, attention_dropout=0.1),
}


@pytest.fixture(params=CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def model(request):
    return request.param


def test_their_model_loads_ours_strictly_and_gives_it_back(model):
    ours = weights(model)
    state, config = to_huggingface(ours, model, VOCABULARY)
    other = theirs(config)
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(other.state_dict()[name], each) for name, each in state.items())

    tensors, fields = from_huggingface(other.state_dict(), other.config.to_dict())
    assert tensors.keys() == ours.keys()
    for name in ours:
        assert torch.equal(tensors[name], ours[name]), name
    assert ModelConfig.model_validate(fields) == model

    again, config_again = to_huggingface(tensors, ModelConfig.model_validate(fields), VOCABULARY)
    assert config_again == config
    assert again.keys() == other.state_dict().keys()
    assert all(torch.equal(again[name], each) for name, each in other.state_dict().items())


def test_their_numbers_say_the_same(model):
    """Parameter counts agree, and each field that changes the mathematics arrives."""
    _, config = to_huggingface(weights(model), model, VOCABULARY)
    other = theirs(config)
    shapes = parameter_shapes(model, VOCABULARY)
    assert other.num_parameters() == sum(math.prod(shape) for shape in shapes.values())
    assert other.config.vocab_size == VOCABULARY
    assert other.config.max_position_embeddings == 32
    assert other.config.tie_word_embeddings == model.tie_embeddings
    assert other.config.initializer_range == model.init_std
    if model.position_embedding == "learned":
        assert other.config.layer_norm_epsilon == model.norm_epsilon
        assert other.config.activation_function == "gelu_new"
        assert other.config.n_inner == model.ffn_hidden_size
    else:
        assert other.config.rms_norm_eps == model.norm_epsilon
        assert other.config.rope_parameters["rope_theta"] == model.rope_theta
        assert other.config.head_dim == model.head_dim
        assert other.config.num_key_value_heads == model.num_query_groups
        if config["model_type"] == "llama":
            assert other.config.attention_bias == other.config.mlp_bias == model.bias


def test_padding_rows_are_cut(model):
    padded = weights(model, 384)
    state, config = to_huggingface(padded, model, VOCABULARY)
    assert config["vocab_size"] == VOCABULARY
    for name in ("transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            assert state[name].shape[0] == VOCABULARY
    cut = {
        name: each[:VOCABULARY] if each.shape[0] == 384 else each for name, each in padded.items()
    }
    tensors, _ = from_huggingface(state, config)
    assert all(torch.equal(tensors[name], cut[name]) for name in cut)


@pytest.mark.parametrize("rows", [300, 302, 512])
def test_another_number_of_rows_is_refused(model, rows):
    with pytest.raises(UserError, match=r"embedding\.word_embeddings\.weight has"):
        to_huggingface(weights(model, rows), model, VOCABULARY)


def test_gpt2_projections_by_hand():
    """One matrix by the definition: x @ c_attn.weight holds q, k and v side by side."""
    model = gpt2()
    ours = weights(model)
    state, _ = to_huggingface(ours, model, VOCABULARY)
    x = torch.randn(12)
    qkv = x @ state["transformer.h.1.attn.c_attn.weight"]
    prefix = "layers.1.self_attention.linear_qkv"
    for number, part in enumerate("qkv"):
        expected = ours[f"{prefix}.{part}.weight"] @ x
        torch.testing.assert_close(qkv[12 * number : 12 * (number + 1)], expected)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (gpt2(normalization="rmsnorm"), "normalization"),
        (gpt2(activation="swiglu"), "activation"),
        (gpt2(bias=False), "bias"),
        (gpt2(qkv_bias=False), "qkv_bias"),
        (gpt2(qk_norm=True), "qk_norm"),
        (gpt2(num_query_groups=1), "num_query_groups"),
        (gpt2(head_dim=6), "head_dim"),
        (llama(normalization="layernorm"), "normalization"),
        (llama(activation="gelu"), "activation"),
        (llama(bias=True), "qkv_bias"),
        (llama(hidden_dropout=0.1), "hidden_dropout"),
        (llama(hidden_size=18), "hidden_size"),
        (qwen2(activation="gelu"), "activation"),
        (qwen2(hidden_dropout=0.1), "hidden_dropout"),
        (qwen3(bias=True), "bias"),
        (qwen3(qkv_bias=True), "qkv_bias"),
        (qwen3(normalization="layernorm"), "normalization"),
    ],
)
def test_what_they_cannot_express_is_refused_by_name(model, field):
    with pytest.raises(UserError, match=rf"^model.{field} = .* only.*; .* or export.format: none"):
        to_huggingface(weights(model), model, VOCABULARY)


def test_missing_and_unknown_tensors_of_ours_are_refused(model):
    ours = weights(model)
    for name in ours:
        with pytest.raises(UserError, match="the model lacks"):
            to_huggingface({key: each for key, each in ours.items() if key != name}, model, 301)
    with pytest.raises(UserError, match="the model holds extra"):
        to_huggingface(ours | {"extra": torch.zeros(1)}, model, VOCABULARY)


def test_missing_and_unknown_tensors_of_theirs_are_refused(model):
    state, config = to_huggingface(weights(model), model, VOCABULARY)
    for name in state:
        if name == "lm_head.weight" and model.tie_embeddings:
            continue
        fewer = {key: each for key, each in state.items() if key != name}
        with pytest.raises(UserError, match=f"the weights lack {name}"):
            from_huggingface(fewer, config)
        with pytest.raises(UserError, match=f"{name} has shape"):
            from_huggingface(
                state | {name: state[name][:-1]}, config | {"tie_word_embeddings": False}
            )
    with pytest.raises(UserError, match="the weights hold extra"):
        from_huggingface(state | {"extra": torch.zeros(1)}, config)


def test_tied_files_may_leave_the_head_out_but_not_change_it():
    model = gpt2()
    state, config = to_huggingface(weights(model), model, VOCABULARY)
    head = state.pop("lm_head.weight")
    tensors, _ = from_huggingface(state, config)
    assert torch.equal(tensors["embedding.word_embeddings.weight"], head)
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        from_huggingface(state | {"lm_head.weight": head + 1}, config)


def test_older_files_without_prefix_and_with_buffers():
    """As the first GPT-2 files are: bare names, causal masks among the weights, no n_inner."""
    model = gpt2(ffn_hidden_size=48)
    state, config = to_huggingface(weights(model), model, VOCABULARY)
    bare = {name.removeprefix("transformer."): each for name, each in state.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    del bare["lm_head.weight"], config["n_inner"], config["tie_word_embeddings"]
    tensors, fields = from_huggingface(bare, config)
    assert ModelConfig.model_validate(fields) == model
    assert all(torch.equal(tensors[name], each) for name, each in weights(model).items())


def test_older_llama_files():
    """rope_theta at the top or left to its default, no head_dim, no kv heads."""
    model = llama(num_query_groups=4, head_dim=4, rope_theta=10000.0)
    state, config = to_huggingface(weights(model), model, VOCABULARY)
    config |= {"pretraining_tp": 1, "_name_or_path": "somewhere", "rope_scaling": None}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    for name in ("rope_parameters", "rope_theta", "head_dim", "num_key_value_heads", "mlp_bias"):
        del config[name]
    assert ModelConfig.model_validate(from_huggingface(state, config)[1]) == model
    config["rope_theta"] = 500000
    assert from_huggingface(state, config)[1]["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("gpt2", "model_type", "gptj"),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "embd_pdrop", 0.2),
        ("gpt2", "vocab_size", None),
        ("gpt2", "n_layer", "2"),
        ("gpt2", "n_embd", 13),
        ("gpt2", "layer_norm_epsilon", "small"),
        ("gpt2", "initializer_range", -1.0),
        ("gpt2", "tie_word_embeddings", "yes"),
        ("gpt2", "final_logit_softcapping", 30.0),
        ("llama", "hidden_act", "gelu"),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "num_key_value_heads", 3),
        ("llama", "mlp_bias", True),
        ("llama", "attention_bias", True),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "llama3", "rope_theta": 500000.0}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_theta", 10000.0),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen2", "rope_parameters", {"full_attention": {"rope_theta": 1e6}}),
        ("qwen2", "use_mrope", True),
        ("qwen2", "attention_bias", True),
        ("qwen3", "attention_bias", True),
        ("qwen3", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3", "head_dim", 0),
    ],
)
def test_what_we_cannot_express_is_refused_by_name(kind, field, value):
    model = {"gpt2": gpt2, "llama": llama, "qwen2": qwen2, "qwen3": qwen3}[kind]()
    state, config = to_huggingface(weights(model), model, VOCABULARY)
    complaint = {"attention_bias": "bias"}.get(field, field)
    complaint = {"initializer_range": "init_std", "tie_word_embeddings": "tie"}.get(
        field, complaint
    )
    with pytest.raises(UserError, match=complaint):
        from_huggingface(state, config | {field: value})


@given(
    layers=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 3, 6]),
    head_dim=st.integers(1, 4).map(lambda half: 2 * half),
    vocab=st.integers(1, 40),
    tie=st.booleans(),
    padded=st.booleans(),
    make=st.sampled_from([llama, qwen2, qwen3]),
)
def test_rope_round_trip(layers, groups, head_dim, vocab, tie, padded, make):
    model = make(
        num_layers=layers,
        hidden_size=12,
        num_attention_heads=6,
        num_query_groups=groups,
        head_dim=head_dim,
        tie_embeddings=tie,
        vocab_size_multiple=16,
    )
    rows = -(-vocab // 16) * 16 if padded else vocab
    ours = weights(model, rows)
    tensors, fields = from_huggingface(*to_huggingface(ours, model, vocab))
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    for name, each in ours.items():
        assert torch.equal(tensors[name], each[:vocab] if name in vocabulary else each)
    restored = ModelConfig.model_validate(fields | {"vocab_size_multiple": 16})
    assert restored == model
