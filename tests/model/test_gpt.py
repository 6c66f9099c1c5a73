"""The model against the plain one: names, values, gradients, and the same over tensor ranks."""

import pytest
import torch
import torch.distributed as dist

from lib.config.run_config import count_parameters
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, StageSlice
from lib.parallel.groups import Group, ParallelGroups
from lib.parallel.storage import named_parts
from tests.distributed import run_on_ranks
from tests.model.models import (
    CONFIGS,
    GPT2,
    LLAMA,
    PADDED,
    QWEN,
    VOCAB_SIZE,
    build,
    drawn_tokens,
    fill,
    join,
    rough_weights,
)
from tests.reference import FLOAT64, plain_logits, plain_losses
from tests.stored import gradients_of


def shapes(model):
    return {name: tuple(part.value.shape) for name, part in named_parts(model)}


def both_layers(by_name):
    return {f"layers.{n}.{name}": shape for n in (0, 1) for name, shape in by_name.items()}


def test_names_and_shapes_of_gpt2():
    assert shapes(build(GPT2)) == {
        "embedding.word_embeddings.weight": (48, 16),
        "embedding.position_embeddings.weight": (12, 16),
        "final_layernorm.weight": (16,),
        "final_layernorm.bias": (16,),
    } | both_layers(
        {
            "input_layernorm.weight": (16,),
            "input_layernorm.bias": (16,),
            "self_attention.linear_qkv.q.weight": (16, 16),
            "self_attention.linear_qkv.q.bias": (16,),
            "self_attention.linear_qkv.k.weight": (16, 16),
            "self_attention.linear_qkv.k.bias": (16,),
            "self_attention.linear_qkv.v.weight": (16, 16),
            "self_attention.linear_qkv.v.bias": (16,),
            "self_attention.linear_proj.weight": (16, 16),
            "self_attention.linear_proj.bias": (16,),
            "pre_mlp_layernorm.weight": (16,),
            "pre_mlp_layernorm.bias": (16,),
            "mlp.linear_fc1.up.weight": (32, 16),
            "mlp.linear_fc1.up.bias": (32,),
            "mlp.linear_fc2.weight": (16, 32),
            "mlp.linear_fc2.bias": (16,),
        }
    )


def test_names_and_shapes_of_llama():
    assert shapes(build(LLAMA)) == {
        "embedding.word_embeddings.weight": (48, 16),
        "output_layer.weight": (48, 16),
        "final_layernorm.weight": (16,),
    } | both_layers(
        {
            "input_layernorm.weight": (16,),
            "self_attention.linear_qkv.q.weight": (24, 16),
            "self_attention.linear_qkv.k.weight": (12, 16),
            "self_attention.linear_qkv.v.weight": (12, 16),
            "self_attention.linear_proj.weight": (16, 24),
            "pre_mlp_layernorm.weight": (16,),
            "mlp.linear_fc1.gate.weight": (32, 16),
            "mlp.linear_fc1.up.weight": (32, 16),
            "mlp.linear_fc2.weight": (16, 32),
        }
    )


def test_names_and_shapes_that_only_qwen_has():
    assert set(shapes(build(QWEN))) - set(shapes(build(LLAMA))) == {
        f"layers.{number}.self_attention.{name}"
        for number in (0, 1)
        for name in (
            "q_layernorm.weight",
            "k_layernorm.weight",
            "linear_qkv.q.bias",
            "linear_qkv.k.bias",
            "linear_qkv.v.bias",
        )
    }
    assert shapes(build(QWEN))["layers.0.self_attention.q_layernorm.weight"] == (6,)
    assert set(shapes(build(LLAMA))) - set(shapes(build(QWEN))) == {"output_layer.weight"}


@pytest.mark.parametrize("base", sorted(CONFIGS))
@pytest.mark.parametrize("tied", [True, False])
def test_number_of_parameters_is_the_closed_formula(base, tied):
    config = CONFIGS[base].model_copy(update={"tie_embeddings": tied})
    model = build(config)
    padding = (PADDED - VOCAB_SIZE) * config.hidden_size * (1 if tied else 2)
    counted = sum(value.numel() for value in model.parameters()) - padding
    assert counted == count_parameters(config, VOCAB_SIZE)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_losses_and_gradients_are_those_of_the_plain_model(name, backend):
    config = CONFIGS[name]
    weights = {key: value.requires_grad_() for key, value in rough_weights(config).items()}
    model = build(config, backend=backend)
    fill(model, {key: value.detach() for key, value in weights.items()})
    tokens, labels = drawn_tokens(1, 3, 9)
    losses = model(tokens.T, labels.T)
    expected = plain_losses(weights, config, VOCAB_SIZE, tokens, labels)
    assert losses.shape == (9, 3)
    torch.testing.assert_close(losses.T, expected, **FLOAT64)
    factors = torch.randn(3, 9, dtype=torch.float64)
    (losses.T * factors).sum().backward()
    (expected * factors).sum().backward()
    found = gradients_of(model)
    assert set(found) == set(weights)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, weights[key].grad, **FLOAT64)
        assert gradient.ne(0).any()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_are_those_of_the_plain_model(name):
    config, weights = CONFIGS[name], rough_weights(CONFIGS[name])
    model = build(config)
    fill(model, weights)
    tokens, _ = drawn_tokens(2, 2, 12)
    expected = plain_logits(weights, config, tokens)
    torch.testing.assert_close(model(tokens.T), expected.transpose(0, 1), **FLOAT64)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_later_token_changes_no_earlier_output(name):
    config = CONFIGS[name]
    model = build(config)
    fill(model, rough_weights(config))
    tokens, _ = drawn_tokens(3, 1, 10)
    base = model(tokens.T).detach()
    for place in range(10):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % VOCAB_SIZE
        output = model(changed.T).detach()
        assert torch.equal(output[:place], base[:place])
        assert not torch.equal(output[place], base[place])


def test_samples_of_a_batch_do_not_see_each_other():
    model = build(LLAMA)
    fill(model, rough_weights(LLAMA))
    tokens, labels = drawn_tokens(4, 4, 8)
    together = model(tokens.T, labels.T)
    for row in range(4):
        alone = model(tokens[row : row + 1].T, labels[row : row + 1].T)
        torch.testing.assert_close(alone[:, 0], together[:, row], **FLOAT64)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_padding_of_the_vocabulary_changes_nothing(name):
    config = CONFIGS[name]
    tokens, labels = drawn_tokens(5, 2, 8)
    losses = [build(config, padded=padded)(tokens.T, labels.T).detach() for padded in (37, 40, 128)]
    eps = torch.finfo(torch.float32).eps
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=16 * eps, atol=0)


def test_stages_one_after_another_are_the_whole_model():
    weights = rough_weights(LLAMA)
    whole = build(LLAMA)
    fill(whole, weights)
    stages = [
        GPTModel(
            LLAMA,
            vocab_size=VOCAB_SIZE,
            padded_vocab_size=PADDED,
            groups=ParallelGroups(),
            options=ModelOptions(attention_backend("auto")),
            part=part,
        )
        for part in (
            StageSlice(range(1), first=True, last=False),
            StageSlice(range(1, 2), first=False, last=True),
        )
    ]
    for stage in stages:
        fill(stage, weights)
    names = [name for stage in stages for name, _ in named_parts(stage)]
    assert sorted(names) == sorted(weights)
    tokens, labels = drawn_tokens(6, 2, 8)
    hidden = stages[0](tokens.T)
    assert hidden.shape == (8, 2, 16)
    assert torch.equal(stages[1](hidden, labels.T), whole(tokens.T, labels.T))


def train_pass_on_rank(config, tokens, labels):
    tp = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    model = build(config, groups=ParallelGroups(tp=tp))
    fill(model, rough_weights(config))
    losses = model(tokens.T, labels.T)
    losses.sum().backward()
    logits = model(tokens.T).detach()
    return losses.detach(), logits, gradients_of(model)


@pytest.mark.parametrize(
    ("name", "tensor", "kv_heads"),
    [
        *((name, tensor, 4) for name in sorted(CONFIGS) for tensor in (2, 4)),
        ("gpt2", 2, 1),
        ("llama", 4, 2),
        ("qwen", 4, 1),
    ],
)
def test_tensor_ranks_together_are_the_whole_model(name, tensor, kv_heads):
    """Losses, logits and every gradient; what each rank holds whole has one gradient (B29).

    Where there are fewer key heads than ranks, and for norms of heads, it is a sum of parts.
    """
    config = CONFIGS[name].model_copy(update={"num_query_groups": kv_heads})
    tokens, labels = drawn_tokens(7, 2, 9)
    whole = build(config)
    fill(whole, rough_weights(config))
    losses = whole(tokens.T, labels.T)
    losses.sum().backward()
    ranks = run_on_ranks(tensor, train_pass_on_rank, config, tokens, labels)
    for rank in ranks:
        torch.testing.assert_close(rank[0], losses.detach(), **FLOAT64)
    logits = torch.cat([rank[1] for rank in ranks], dim=-1)
    torch.testing.assert_close(logits, whole(tokens.T).detach(), **FLOAT64)
    for key, gradient in gradients_of(whole).items():
        gathered = join([rank[2][key] for rank in ranks], gradient.shape)
        torch.testing.assert_close(gathered, gradient, **FLOAT64)


def test_evaluation_mode_drops_nothing():
    config = GPT2.model_copy(update={"hidden_dropout": 0.5, "attention_dropout": 0.5})
    model = build(config)
    tokens, labels = drawn_tokens(8, 2, 8)
    assert not torch.equal(model(tokens.T, labels.T), model(tokens.T, labels.T))
    plain = build(GPT2)(tokens.T, labels.T)
    state = torch.get_rng_state()
    assert torch.equal(model.eval()(tokens.T, labels.T), plain)
    assert torch.equal(torch.get_rng_state(), state)  # B70: nothing was drawn
