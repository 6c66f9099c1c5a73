"""Model FLOPs against counts by hand, and peaks of devices."""

import pytest

from lib.config.schema import ModelConfig
from lib.model.flops import dense_peak_tflops, training_flops_per_token
from tests.model.models import GPT2

# B55: head_dim is not hidden / heads, keys have fewer heads, the MLP is gated.
SMALL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=64,
    max_position_embeddings=16,
    qkv_bias=False,
    activation="swiglu",
)


def test_hand_count_of_a_small_gated_model():
    # A token's multiply-adds of one layer: query 32x64, key and value 32x32 each, projection
    # 64x32, three 32x64 of the MLP; scores and context, causal half: 64 x 16 / 2 each.
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64 + 2 * (64 * 16 // 2)
    assert layer == 13_312
    head = 32 * 300
    # Two operations a multiply-add; backward costs twice the forward.
    assert training_flops_per_token(SMALL, 16, 300) == 6 * (3 * layer + head) == 297_216


def test_known_count_of_gpt2_small():
    """124 M: 6 x (85 M weights in layers + 38.6 M of the head) + attention."""
    config = ModelConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_query_groups=12,
        head_dim=64,
        ffn_hidden_size=3072,
        max_position_embeddings=1024,
        qkv_bias=True,
    )
    expected = 6 * (12 * 12 * 768**2 + 768 * 50_304) + 12 * 6 * 768 * 1024
    assert training_flops_per_token(config, 1024, 50_304) == expected


def test_megatrons_formula_for_a_batch():
    """A.15: tokens x [...] + 6 q sum(seq^2), for a batch of 8 sequences of 12."""
    tokens, length = 8 * 12, 12
    h, q, kv, ffn = 16, 16, 16, 32
    per_layer = tokens * (6 * h * 2 * ffn + 6 * h * (q + 2 * kv) + 6 * q * h)
    per_layer += 6 * q * 8 * length**2
    expected = 2 * per_layer + tokens * 6 * h * 48
    assert tokens * training_flops_per_token(GPT2, length, 48) == expected


def test_tied_embeddings_and_position_table_cost_nothing_more():
    untied = SMALL.model_copy(update={"tie_embeddings": False, "max_position_embeddings": 999})
    assert training_flops_per_token(untied, 16, 300) == training_flops_per_token(SMALL, 16, 300)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 NVL", None),  # slower than the other two
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),  # not an L4
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("NVIDIA GeForce RTX 4090 D", None),  # another chip
        ("cpu", None),
        ("Tesla V100-SXM2-32GB", None),
        ("", None),
    ],
)
def test_dense_peaks(name, peak):
    """B55: an unknown device has no peak, rather than a wrong one."""
    assert dense_peak_tflops(name) == peak
