"""Our models against Hugging Face's with the same weights: same logits, same gradients, in fp32.

The weights are chosen so that a wrong detail shows: embeddings are small (so that the norms'
epsilon matters), biases and norm weights are random, and the vocabulary has padding rows filled
with noise, which must not matter. A failure says which detail differs: logits off everywhere by
much is a wrong mapping; off by 1e-3 and growing with the position, the rotary angles; gradients
alone, a detached or doubly counted path.
"""

import pytest
import torch
from torch.nn import functional as F

from lib.checkpoint.huggingface import to_huggingface
from lib.checkpoint.shapes import parameter_shapes
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import named_parts
from tests.checkpoint.test_huggingface import VOCABULARY, gpt2, llama, qwen2, qwen3, theirs
from tests.stored import gradients_of, values_of

PADDED = 384
SEQ_LENGTH, BATCH = 24, 3
CONFIGURATIONS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(tie_embeddings=False),
    "gpt2 epsilon": gpt2(norm_epsilon=1e-4),
    "llama": llama(),
    "llama tied": llama(tie_embeddings=True),
    "llama one kv head": llama(num_query_groups=1),
    "llama all kv heads": llama(num_query_groups=4),
    "llama all kv heads tied": llama(num_query_groups=4, tie_embeddings=True),
    "llama theta and epsilon": llama(rope_theta=10000.0, norm_epsilon=1e-5),
    "llama with biases": llama(bias=True, qkv_bias=True),
    "qwen2": qwen2(),
    "qwen2 one kv head tied": qwen2(num_query_groups=1, tie_embeddings=True),
    "qwen3": qwen3(),
    "qwen3 all kv heads, odd width": qwen3(num_query_groups=4, hidden_size=18, head_dim=8),
    "qwen3 tied": qwen3(num_query_groups=1, tie_embeddings=True, rope_theta=10000.0),
}


def ours(config, backend="auto"):
    model = GPTModel(
        config,
        vocab_size=VOCABULARY,
        padded_vocab_size=PADDED,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend(backend)),
        part=whole_model(config),
    )
    generator = torch.Generator().manual_seed(3)
    shapes = parameter_shapes(config, PADDED)
    parameters = {name: part.value for name, part in named_parts(model)}
    assert {name: tuple(each.shape) for name, each in parameters.items()} == shapes
    with torch.no_grad():
        for name, parameter in parameters.items():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("layernorm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.startswith("embedding"):
                parameter.copy_(0.02 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model


def pair(config, backend="auto", **their_changes):
    model = ours(config, backend)
    state, their_config = to_huggingface(values_of(model), config, VOCABULARY)
    other = theirs(their_config | their_changes).eval()
    other.load_state_dict(state, strict=True)
    return model, other


def tokens():
    generator = torch.Generator().manual_seed(11)
    windows = torch.randint(VOCABULARY, (BATCH, SEQ_LENGTH + 1), generator=generator)
    return windows[:, :-1], windows[:, 1:]


def logits(model, other):
    inputs, _ = tokens()
    with torch.no_grad():
        return model(inputs.T)[..., :VOCABULARY].transpose(0, 1), other(inputs).logits


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_same_logits(config, backend):
    assert config.max_position_embeddings > SEQ_LENGTH
    mine, expected = logits(*pair(config, backend))
    assert mine.dtype == expected.dtype == torch.float32
    assert expected.std() > 0.05, "logits too small for the tolerance to mean anything"
    close(mine, expected)


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_same_loss_and_gradients(config):
    model, other = pair(config)
    inputs, labels = tokens()
    losses = model(inputs.T, labels.T)
    expected = F.cross_entropy(
        other(inputs).logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    close(losses.T.flatten(), expected)
    losses.mean().backward()
    expected.mean().backward()

    gradients = gradients_of(model)
    assert all(each is not None for each in gradients.values())
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in gradients:
            assert not gradients[name][VOCABULARY:].any(), "padding rows must get no gradient"
    mapped, _ = to_huggingface(gradients, config, VOCABULARY)
    theirs_by_name = {name: each.grad for name, each in other.named_parameters()}
    assert set(theirs_by_name) == set(mapped) - (
        {"lm_head.weight"} if config.tie_embeddings else set()
    )
    for name, gradient in theirs_by_name.items():
        assert gradient.abs().max() > 1e-8 or "k_proj.bias" in name, name
        torch.testing.assert_close(mapped[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (gpt2(), {"layer_norm_epsilon": 1e-6}),
        (gpt2(), {"activation_function": "gelu"}),
        (llama(), {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        (llama(), {"rms_norm_eps": 1e-5}),
        (qwen3(), {"rms_norm_eps": 1e-5}),
    ],
)
def test_a_wrong_detail_would_be_noticed(config, change):
    """With one field of their configuration changed, the comparison above fails."""
    mine, expected = logits(*pair(config, **change))
    with pytest.raises(AssertionError):
        close(mine, expected)


def test_a_wrong_order_of_kv_heads_would_be_noticed():
    config = llama(num_query_groups=2)
    model, other = pair(config)
    with torch.no_grad():
        weight = dict(named_parts(model))["layers.0.self_attention.linear_qkv.k.weight"].value
        weight.copy_(weight.view(2, config.head_dim, -1).flip(0).flatten(0, 1))
    mine, expected = logits(model, other)
    with pytest.raises(AssertionError):
        close(mine, expected)
