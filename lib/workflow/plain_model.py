"""A decoder in plain torch, as one writes it by hand for one device: what Drydock is measured by.

GPT-2's or Llama's kind by the same ``model`` section, with torch's own modules, the fused
projections of q, k, v and of gate and up, and scaled_dot_product_attention; it shares no code with
``lib.layers``, so that equal losses check both. Shape legend: B batch, S sequence, H hidden,
N heads, G key and value heads, D head dimension, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.config.schema import ModelConfig


class _Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, groups, size = (
            config.num_attention_heads,
            config.num_query_groups,
            config.head_dim,
        )
        self.sizes = (heads, groups, groups)
        self.head_dim = size
        self.qkv = nn.Linear(config.hidden_size, (heads + 2 * groups) * size, bias=config.qkv_bias)
        self.out = nn.Linear(heads * size, config.hidden_size, bias=config.bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(size, eps=config.norm_epsilon)
            self.k_norm = nn.RMSNorm(size, eps=config.norm_epsilon)

    def forward(self, x_BSH: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        heads_BNSD = self.qkv(x_BSH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads_BNSD.split(self.sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = _turn(q, *angles), _turn(k, *angles)
        if self.sizes[0] != self.sizes[1]:
            times = self.sizes[0] // self.sizes[1]
            k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        mixed_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed_BNSD.transpose(1, 2).flatten(2))


def _turn(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary position embedding: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    first, second = x_BNSD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BNSD * cos_SD + turned * sin_SD).to(x_BNSD.dtype)


class _MLP(nn.Module):
    """Two matrices and GELU (tanh form), or three and SwiGLU, gate and up in one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_gated = config.activation == "swiglu"
        width = config.ffn_hidden_size * (2 if self.is_gated else 1)
        self.up = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        wide = self.up(x_BSH)
        if not self.is_gated:
            return self.down(F.gelu(wide, approximate="tanh"))
        gate, up = wide.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = _Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = _MLP(config)

    def forward(self, x_BSH: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), angles)
        return x_BSH + self.mlp(self.mlp_norm(x_BSH))


def _norm(config: ModelConfig) -> nn.Module:
    if config.normalization == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)


class PlainModel(nn.Module):
    """The model, which gives the mean loss of its tokens.

    Args:
        config: the resolved ``model`` section; dropout is not applied.
        vocab_size: V, of real tokens alone.
    """

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        hidden, length = config.hidden_size, config.max_position_embeddings
        self.tokens = nn.Embedding(vocab_size, hidden)
        self.positions: nn.Embedding | None = None
        if config.position_embedding == "learned":
            self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angle = torch.outer(torch.arange(length).float(), config.rope_theta**-exponent)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos_SD", angle.cos(), persistent=False)
        self.register_buffer("sin_SD", angle.sin(), persistent=False)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._mean_loss

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross entropy in nats, fp32, of int64 tokens and of those that follow them."""
        length = tokens_BS.shape[1]
        x_BSH = self.tokens(tokens_BS)
        angles = None
        if self.positions is not None:
            x_BSH = x_BSH + self.positions.weight[:length]
        else:
            angles = (self.cos_SD[:length], self.sin_SD[:length])
        for block in self.blocks:
            x_BSH = block(x_BSH, angles)
        return self._loss(x_BSH, labels_BS)

    def _mean_loss(self, x_BSH: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = self.head(self.norm(x_BSH)).float()
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())

    def compile_parts(self) -> None:
        """Compiles each block, and the norm, projection and loss together, when first called."""
        for block in self.blocks:
            block.compile()
        self._loss = torch.compile(self._mean_loss)

    @torch.no_grad()
    def draw(self) -> None:
        """Initial weights: matrices N(0, init_std), norms one, biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, self.config.init_std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes Drydock's weights, whole, by their global names (``lib.checkpoint.shapes``)."""
        for name, parameter in self.named_parameters():
            rows = torch.cat([weights[each] for each in _names(name, self.config)])
            parameter.copy_(rows[: parameter.shape[0]])  # without padding of the vocabulary


_NAMES = {
    "tokens": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "final_layernorm",
    "head": "output_layer",
    "attention_norm": "input_layernorm",
    "attention.out": "self_attention.linear_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.down": "mlp.linear_fc2",
}


def _names(name: str, config: ModelConfig) -> list[str]:
    """Drydock's parameters that, one below the other, make one of the plain model's."""
    path, kind = name.rsplit(".", 1)
    prefix = ""
    if path.startswith("blocks."):
        _, number, path = path.split(".", 2)
        prefix = f"layers.{number}."
    if path == "attention.qkv":
        return [f"{prefix}self_attention.linear_qkv.{part}.{kind}" for part in "qkv"]
    if path == "mlp.up":
        parts = ("gate", "up") if config.activation == "swiglu" else ("up",)
        return [f"{prefix}mlp.linear_fc1.{part}.{kind}" for part in parts]
    return [f"{prefix}{_NAMES[path]}.{kind}"]
