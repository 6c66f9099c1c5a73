"""The model, its loss and its optimizer once more, as plainly as they can be written.

What the layers, the model and the training tests compare with: whole tensors, batch first, no
module, no parallelism, no kernel; heads one by one, rotary positions as complex numbers.
"""

import math

import torch

# Floating point sums of some hundred terms of order one, in float64.
FLOAT64 = {"rtol": 1e-10, "atol": 1e-13}


def plain_norm(x, weights, name, config):
    weight = weights[f"{name}.weight"]
    if config.normalization == "layernorm" and f"{name}.bias" in weights:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return centred / scale * weight + weights[f"{name}.bias"]
    return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * weight


def plain_linear(x, weights, name):
    y = torch.einsum("...i,oi->...o", x, weights[f"{name}.weight"])
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def plain_rotary(x_BSD, theta, positions=None):
    """Turns pairs (i, i + D/2) as complex numbers; angles in float32 as everybody has them."""
    half = x_BSD.shape[-1] // 2
    positions = torch.arange(x_BSD.shape[1]) if positions is None else positions
    exponent = torch.arange(half, dtype=torch.float32) * 2 / x_BSD.shape[-1]
    angle = torch.outer(positions.to(torch.float32), theta**-exponent)
    turn = torch.complex(angle.cos().to(x_BSD.dtype), angle.sin().to(x_BSD.dtype))
    turned = torch.complex(x_BSD[..., :half], x_BSD[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_attention(q_BSD, k_BSD, v_BSD):
    """Causal attention of one head, row by row."""
    rows = []
    for place in range(q_BSD.shape[1]):
        scores = torch.einsum("bd,btd->bt", q_BSD[:, place], k_BSD[:, : place + 1])
        shares = torch.softmax(scores / math.sqrt(q_BSD.shape[-1]), dim=-1)
        rows.append(torch.einsum("bt,btd->bd", shares, v_BSD[:, : place + 1]))
    return torch.stack(rows, dim=1)


def _attention_layer(x, weights, name, config, positions):
    q, k, v = (plain_linear(x, weights, f"{name}.linear_qkv.{part}") for part in "qkv")
    size, shared = config.head_dim, config.num_attention_heads // config.num_query_groups
    heads = []
    for head in range(config.num_attention_heads):
        mine = slice(head * size, (head + 1) * size)
        theirs = slice(head // shared * size, (head // shared + 1) * size)
        query, key = q[..., mine], k[..., theirs]
        if config.qk_norm:
            query = plain_norm(query, weights, f"{name}.q_layernorm", config)
            key = plain_norm(key, weights, f"{name}.k_layernorm", config)
        if config.position_embedding == "rope":
            query = plain_rotary(query, config.rope_theta, positions)
            key = plain_rotary(key, config.rope_theta, positions)
        heads.append(plain_attention(query, key, v[..., theirs]))
    return plain_linear(torch.cat(heads, dim=-1), weights, f"{name}.linear_proj")


def _mlp_layer(x, weights, name, config):
    up = plain_linear(x, weights, f"{name}.linear_fc1.up")
    if config.activation == "swiglu":
        gate = plain_linear(x, weights, f"{name}.linear_fc1.gate")
        active = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        active = 0.5 * up * (1 + torch.tanh(inner))
    return plain_linear(active, weights, f"{name}.linear_fc2")


def plain_logits(weights, config, tokens_BS, positions=None):
    """Logits [B, S, V_padded] from weights by their global names; positions [S], else 0, 1, 2..."""
    positions = torch.arange(tokens_BS.shape[1]) if positions is None else positions
    table = weights["embedding.word_embeddings.weight"]
    x = table[tokens_BS]
    if config.position_embedding == "learned":
        x = x + weights["embedding.position_embeddings.weight"][positions]
    for number in range(config.num_layers):
        layer = f"layers.{number}"
        normed = plain_norm(x, weights, f"{layer}.input_layernorm", config)
        x = x + _attention_layer(normed, weights, f"{layer}.self_attention", config, positions)
        normed = plain_norm(x, weights, f"{layer}.pre_mlp_layernorm", config)
        x = x + _mlp_layer(normed, weights, f"{layer}.mlp", config)
    x = plain_norm(x, weights, "final_layernorm", config)
    return x @ weights.get("output_layer.weight", table).T


def plain_losses(weights, config, vocab_size, tokens_BS, labels_BS, positions=None):
    """Loss of every token [B, S], over the real vocabulary."""
    logits = plain_logits(weights, config, tokens_BS, positions)[..., :vocab_size]
    chosen = logits.gather(-1, labels_BS.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, dim=-1) - chosen


class PlainTrainer:
    """Float64 training by the formulas: mean loss per counted token, clipping, AdamW."""

    def __init__(self, weights, config, vocab_size, *, max_norm, weight_decay):
        self.weights = {name: value.double().clone() for name, value in weights.items()}
        self.config, self.vocab_size = config, vocab_size
        self.max_norm, self.weight_decay = max_norm, weight_decay
        self.moments = {
            name: (torch.zeros_like(value), torch.zeros_like(value))
            for name, value in self.weights.items()
        }
        self.steps = 0

    def gradients(self, tokens_BS, labels_BS, counted_BS):
        """Loss and gradients by name, not clipped."""
        leaves = {name: value.requires_grad_() for name, value in self.weights.items()}
        losses = plain_losses(leaves, self.config, self.vocab_size, tokens_BS, labels_BS)
        loss = (losses * counted_BS).sum() / counted_BS.sum()
        values = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        self.weights = {name: value.detach() for name, value in leaves.items()}
        return loss.item(), dict(zip(leaves, values, strict=True))

    def step(self, tokens_BS, labels_BS, counted_BS, *, lr):
        """Loss and gradient norm of one step of AdamW with betas 0.9 and 0.95."""
        loss, gradients = self.gradients(tokens_BS, labels_BS, counted_BS)
        norm = math.sqrt(sum(value.square().sum().item() for value in gradients.values()))
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        self.steps += 1
        for name, gradient in gradients.items():
            mean, square = self.moments[name]
            mean = 0.9 * mean + 0.1 * (gradient * scale)
            square = 0.95 * square + 0.05 * (gradient * scale) ** 2
            self.moments[name] = mean, square
            direction = mean / (1 - 0.9**self.steps)
            direction = direction / ((square / (1 - 0.95**self.steps)).sqrt() + 1e-8)
            decay = self.weight_decay if gradient.ndim >= 2 else 0.0
            old = self.weights[name]
            self.weights[name] = old - lr * (decay * old + direction)
        return loss, norm
