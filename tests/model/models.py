"""The small models that tests build: one in the style of GPT-2, others in the style of Llama."""

import torch

from lib.config.schema import ModelConfig
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.model.initialization import initialize
from lib.model.recompute import Recompute
from lib.parallel.groups import ParallelGroups
from tests import stored

VOCAB_SIZE = 37
PADDED = 48

_SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "head_dim": 4,
    "ffn_hidden_size": 32,
    "max_position_embeddings": 12,
    "qkv_bias": True,
}

GPT2 = ModelConfig(**_SIZES)
LLAMA = ModelConfig(
    **_SIZES
    | {
        "num_query_groups": 2,
        "head_dim": 6,  # not hidden_size / heads
        "qkv_bias": False,
        "bias": False,
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "tie_embeddings": False,
    }
)
QWEN = LLAMA.model_copy(
    update={"num_query_groups": 4, "qkv_bias": True, "qk_norm": True, "tie_embeddings": True}
)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "qwen": QWEN}


def build(
    config,
    *,
    vocab_size=VOCAB_SIZE,
    padded=PADDED,
    seed=1234,
    groups=None,
    backend="auto",
    recompute=None,
):
    """The initialised fp32 model, or one rank's part of it."""
    model = GPTModel(
        config,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        groups=groups or ParallelGroups(),
        options=ModelOptions(attention_backend(backend), recompute or Recompute()),
        part=whole_model(config),
    )
    initialize(model, config, vocab_size=vocab_size, seed=seed)
    return model


def roughen(weights, config):
    """Norm weights and biases away from 1 and 0, larger matrices: so that errors are seen."""
    rough = {}
    for number, (name, value) in enumerate(weights.items()):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        rough[name] = value.double() * (10.0 if value.ndim > 1 else 1.0)
        if value.ndim == 1:
            rough[name] = rough[name] + 0.3 * noise
    return rough


def rough_weights(config, **options):
    """Whole weights by global name, float64."""
    return roughen(stored.values_of(build(config, **options)), config)


def fill(model, weights):
    """Gives a rank's model, float64 then, its part of whole weights."""
    stored.fill(model, weights)


def join(parts, full_shape):
    """The whole tensor of the ranks' parts; what every rank holds whole must be the same on all."""
    if tuple(parts[0].shape) == tuple(full_shape):
        for part in parts[1:]:
            assert torch.equal(part, parts[0])
        return parts[0]
    dim = next(i for i, size in enumerate(full_shape) if parts[0].shape[i] != size)
    return torch.cat(parts, dim=dim)


def drawn_tokens(seed, batch, length, vocab_size=VOCAB_SIZE):
    """Inputs and labels, int64 [B, S]."""
    windows = torch.randint(
        vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed)
    )
    return windows[:, :-1], windows[:, 1:]
