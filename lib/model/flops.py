"""Floating point operations of training, by Megatron's formula, and peaks of devices.

Forward and backward count three times the forward; a multiply-add counts two; the causal half of
attention is counted once; recomputation, norms, activations and the embedding look-up are not
counted. Per token, with H hidden, F feed-forward width, S sequence length, V padded vocabulary,
q = heads x head_dim and kv = groups x head_dim:

    per layer:  6 H (q + 2 kv) + 6 q H + 6 H F (2, or 3 when gated) + 6 q S
    head:       6 H V

MFU is these operations per second over the device's dense bf16 peak. A device that is not in the
table has no MFU, rather than a wrong one.
"""

import re

from lib.config.schema import ModelConfig

MFU_CONVENTION = "model FLOPs, attention by the causal half of the window, over the dense bf16 peak"

# Dense (not sparse) bf16 TFLOP/s by the makers' datasheets.
_DENSE_BF16_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA GeForce RTX 4090": 165.0,
    "NVIDIA GeForce RTX 3090": 71.0,
}
# What may follow in a reported name: "-SXM4-80GB" is the same chip, "0" or " Laptop GPU" is not.
_FORM = re.compile(r"([ -](SXM\d*|PCI[Ee]|\d+GB|HBM\w*))*")


def training_flops_per_token(config: ModelConfig, seq_length: int, padded_vocab_size: int) -> float:
    """Model FLOPs of one token's forward and backward pass."""
    layers = config.num_layers * _layer_flops(config, seq_length)
    return float(layers + 6 * config.hidden_size * padded_vocab_size)


def head_cost_in_layers(config: ModelConfig, seq_length: int, padded_vocab_size: int) -> float:
    """Cost of the output projection in units of one transformer layer."""
    return 6 * config.hidden_size * padded_vocab_size / _layer_flops(config, seq_length)


def _layer_flops(config: ModelConfig, seq_length: int) -> int:
    hidden = config.hidden_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_query_groups * config.head_dim
    matrices = 3 if config.activation == "swiglu" else 2
    projections = 6 * hidden * (query + 2 * key) + 6 * query * hidden
    feed_forward = 6 * hidden * config.ffn_hidden_size * matrices
    return projections + feed_forward + 6 * query * seq_length


def dense_peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a device by its reported name, or None for one not in the table."""
    known = [
        name
        for name in _DENSE_BF16_TFLOPS
        if device_name.startswith(name) and _FORM.fullmatch(device_name[len(name) :])
    ]
    return _DENSE_BF16_TFLOPS[max(known, key=len)] if known else None
