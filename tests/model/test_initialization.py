"""Initial weights: scale as documented, the same in every layout, independent of padding."""

import math

import pytest
import torch
import torch.distributed as dist

from lib.model.initialization import initial_value
from lib.parallel.groups import Group, ParallelGroups
from tests.distributed import run_on_ranks
from tests.model.models import CONFIGS, GPT2, LLAMA, PADDED, VOCAB_SIZE, build, join
from tests.stored import values_of


def weights_on_rank(name):
    config = CONFIGS[name].model_copy(update={"num_query_groups": 4})
    tp = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    model = build(config, groups=ParallelGroups(tp=tp))
    return values_of(model)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("tensor", [2, 4])
def test_the_same_model_at_every_tensor_degree(name, tensor):
    """B30: gathered shards are bitwise the whole model's, and shards differ from each other."""
    config = CONFIGS[name].model_copy(update={"num_query_groups": 4})
    ranks = run_on_ranks(tensor, weights_on_rank, name)
    for key, value in values_of(build(config)).items():
        assert torch.equal(join([rank[key] for rank in ranks], value.shape), value)
        if ranks[0][key].shape != value.shape and value.ndim == 2:
            assert not torch.equal(ranks[0][key], ranks[1][key])


def large_value(name, shape=(300, 400), config=GPT2, **options):
    return initial_value(name, shape, config, **{"vocab_size": 250, "seed": 1} | options)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("embedding.position_embeddings.weight", 1.0),
        ("layers.0.self_attention.linear_qkv.q.weight", 1.0),
        ("layers.0.mlp.linear_fc1.gate.weight", 1.0),
        ("layers.0.self_attention.linear_proj.weight", 1 / math.sqrt(2 * 8)),
        ("layers.7.mlp.linear_fc2.weight", 1 / math.sqrt(2 * 8)),
    ],
)
def test_scale(name, factor):
    config = GPT2.model_copy(update={"num_layers": 8, "init_std": 0.05})
    value = large_value(name, config=config).double()
    count, std = value.numel(), 0.05 * factor
    # Five standard errors of a mean, a standard deviation and the fourth moment.
    assert abs(value.mean()) < 5 * std / count**0.5
    assert abs(value.std() / std - 1) < 5 / (2 * count) ** 0.5
    assert abs((value / std).pow(4).mean() - 3) < 5 * (96 / count) ** 0.5
    assert value.abs().max() > 3.5 * std  # not truncated


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_padding_rows_are_zero_and_change_nothing(name):
    wide, narrow = large_value(name), large_value(name, (250, 400))
    assert wide[250:].eq(0).all()
    assert torch.equal(wide[:250], narrow)
    assert abs(narrow.double().std() / 0.02 - 1) < 5 / (2 * narrow.numel()) ** 0.5


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_vectors(config):
    for name, value in values_of(build(config)).items():
        if value.ndim == 1:
            assert value.eq(0.0 if name.endswith("bias") else 1.0).all()
            assert name.endswith("bias") or "layernorm" in name


def test_names_and_seeds_separate_the_draws():
    names = [f"layers.{n}.mlp.linear_fc1.{part}.weight" for n in (0, 1) for part in ("up", "gate")]
    values = [large_value(name) for name in names] + [large_value(names[0], seed=2)]
    for number, value in enumerate(values):
        for other in values[:number]:
            correlation = (value * other).mean().item() / 0.02**2
            assert abs(correlation) < 5 / value.numel() ** 0.5
    assert torch.equal(values[0], large_value(names[0]))


def test_the_default_generator_is_left_alone():
    state = torch.get_rng_state()
    first = build(GPT2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    for one, other in zip(values_of(first).values(), values_of(build(GPT2)).values(), strict=True):
        assert torch.equal(one, other)


def test_first_loss_is_near_the_logarithm_of_the_vocabulary():
    assert PADDED > VOCAB_SIZE
    tokens = torch.arange(VOCAB_SIZE).unsqueeze(0).repeat(4, 1)[:, :12]
    labels = tokens.roll(-1, dims=1)
    loss = build(GPT2)(tokens.T, labels.T).mean().item()
    # Logits of size 0.02 * 4: the loss differs from a uniform guess by about half their variance.
    assert abs(loss - math.log(VOCAB_SIZE)) < 0.05
