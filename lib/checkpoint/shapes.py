"""Names and shapes of all parameters of a configuration, without building the model.

What a published model must hold and what a conversion must produce. Needs no torch.
"""

from lib.config.schema import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig, rows: int) -> dict[str, Shape]:
    """Every parameter's shape under its global name.

    Args:
        model: the resolved model section.
        rows: rows of the vocabulary tables: the vocabulary's size, or the padded one.
    """
    hidden = model.hidden_size
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (rows, hidden)}
    if model.position_embedding == "learned":
        shapes["embedding.position_embeddings.weight"] = (model.max_position_embeddings, hidden)
    for number in range(model.num_layers):
        for name, shape in _layer(model).items():
            shapes[f"layers.{number}.{name}"] = shape
    shapes |= _norm(model, "final_layernorm", hidden)
    if not model.tie_embeddings:
        shapes["output_layer.weight"] = (rows, hidden)
    return shapes


def _layer(model: ModelConfig) -> dict[str, Shape]:
    hidden, wide = model.hidden_size, model.ffn_hidden_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    shapes = _norm(model, "input_layernorm", hidden) | _norm(model, "pre_mlp_layernorm", hidden)
    for part, size in (("q", queries), ("k", keys), ("v", keys)):
        name = f"self_attention.linear_qkv.{part}"
        shapes |= _linear(name, size, hidden, bias=model.qkv_bias)
    shapes |= _linear("self_attention.linear_proj", hidden, queries, bias=model.bias)
    if model.qk_norm:
        shapes["self_attention.q_layernorm.weight"] = (model.head_dim,)
        shapes["self_attention.k_layernorm.weight"] = (model.head_dim,)
    for part in ("gate", "up") if model.activation == "swiglu" else ("up",):
        shapes |= _linear(f"mlp.linear_fc1.{part}", wide, hidden, bias=model.bias)
    return shapes | _linear("mlp.linear_fc2", hidden, wide, bias=model.bias)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(model: ModelConfig, name: str, size: int) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (size,)}
    return weight | ({f"{name}.bias": (size,)} if model.normalization == "layernorm" else {})
