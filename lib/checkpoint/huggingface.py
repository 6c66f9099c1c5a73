"""Names and shapes to and from Hugging Face: GPT-2, Llama, Qwen2 and Qwen3. Pure mapping.

One table serves both ways. Each line says which of our tensors, stacked along their rows, make one
of theirs, and whether theirs is transposed (GPT-2's Conv1D stores [inputs, outputs]):

    GPT-2   h.N.attn.c_attn [H, 3H]           = (q; k; v)^T
            h.N.attn.c_proj, mlp.c_*          = ours^T
    others  layers.N.self_attn.{q,k,v,o}_proj = ours; heads in the same order, rotate-half alike
            layers.N.self_attn.{q,k}_norm     = ours (Qwen3)
            layers.N.mlp.{gate,up,down}_proj  = ours

Vocabulary padding rows are ours alone: cut on the way out, absent on the way in. What the other
side cannot express is refused by the name of the field, never dropped.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.checkpoint.huggingface_config import config_from_fields, fields_from_config
from lib.checkpoint.shapes import Shape, parameter_shapes
from lib.config.export_rules import family_of
from lib.config.schema import ModelConfig
from lib.errors import UserError

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Buffers that older files hold beside the weights: causal masks and rotary tables, no parameters.
_NO_WEIGHTS = re.compile(
    r"transformer\.h\.\d+\.attn\.(bias|masked_bias)|model\.layers\.\d+\..*rotary_emb\.inv_freq"
)


@dataclass(frozen=True)
class _Line:
    """One tensor of theirs and the tensors of ours that it is made of."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def to_huggingface(
    tensors: Mapping[str, Tensor], model: ModelConfig, vocab_size: int
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Our parameters as a Hugging Face state dict and config.

    Args:
        tensors: whole parameters under our names, vocabulary rows padded or not.
        model: the model's configuration.
        vocab_size: number of real token ids.

    Returns:
        The state dict, as ``load_state_dict(strict=True)`` wants it (with tied embeddings
        ``lm_head.weight`` is the same tensor as the embedding; leave it out of a file), and the
        contents of config.json.

    Raises:
        UserError: the configuration or the tensors cannot be expressed there.
    """
    config = config_from_fields(model, vocab_size)
    state = dict(huggingface_tensors(tensors, model, vocab_size))
    if model.tie_embeddings:
        state["lm_head.weight"] = state[_table(model)[0].theirs]
    return state, config


def huggingface_shapes(model: ModelConfig, vocab_size: int) -> dict[str, Shape]:
    """The shape of each tensor of theirs, in the order of ``huggingface_tensors``."""
    ours = parameter_shapes(model, vocab_size)
    shapes: dict[str, Shape] = {}
    for line in _table(model):
        shape = (sum(ours[name][0] for name in line.ours), *ours[line.ours[0]][1:])
        shapes[line.theirs] = shape[::-1] if line.transposed else shape
    return shapes


def huggingface_tensors(
    tensors: Mapping[str, Tensor], model: ModelConfig, vocab_size: int
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters under their names, one at a time, so that no second copy of all is made.

    Args:
        tensors: as for ``to_huggingface``.
        model: a model that Hugging Face can express.
        vocab_size: number of real token ids.

    Yields:
        Name and tensor; with tied embeddings no ``lm_head.weight``, as files leave it out.

    Raises:
        UserError: these are not the tensors of the model.
    """
    cut = {
        name: tensor[:vocab_size] if name in _VOCABULARY else tensor
        for name, tensor in tensors.items()
    }
    _require_shapes(cut, model, vocab_size)
    padding = -vocab_size % model.vocab_size_multiple
    for name in _VOCABULARY:
        rows = tensors[name].shape[0] if name in tensors else vocab_size
        if rows not in (vocab_size, vocab_size + padding):
            raise UserError(f"{name} has {rows} rows for a vocabulary of {vocab_size}")
    for line in _table(model):
        parts = [cut[name] for name in line.ours]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        yield line.theirs, tensor.t().contiguous() if line.transposed else tensor


def from_huggingface(
    state: Mapping[str, Tensor], config: Mapping[str, object]
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A Hugging Face state dict as our parameters.

    Args:
        state: the weights under their names.
        config: the contents of config.json.

    Returns:
        Our parameters, vocabulary rows not padded, and the fields of the ``model`` section.

    Raises:
        UserError: a field or a tensor that we have no place for, or a missing one.
    """
    fields, vocab_size = fields_from_config(config)
    model = ModelConfig.model_validate(fields)
    shapes = parameter_shapes(model, vocab_size)
    remaining = _weights_only(state, model)
    tensors: dict[str, Tensor] = {}
    missing = [line.theirs for line in _table(model) if line.theirs not in remaining]
    if missing:
        raise UserError(f"the weights lack {_named(missing)}")
    for line in _table(model):
        tensor = remaining.pop(line.theirs)
        tensor = tensor.t() if line.transposed else tensor
        sizes = [shapes[name][0] for name in line.ours]
        expected = (sum(sizes), *shapes[line.ours[0]][1:])
        if tuple(tensor.shape) != expected:
            raise UserError(f"{line.theirs} has shape {tuple(tensor.shape)}, expected {expected}")
        for name, part in zip(line.ours, tensor.split(sizes), strict=True):
            tensors[name] = part.contiguous()
    if remaining:
        raise UserError(f"the weights hold {_named(remaining)}, which has no place in this model")
    return tensors, fields


def _weights_only(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The state dict without buffers, and without the second copy of tied embeddings."""
    prefix = "transformer." if family_of(model) == "gpt2" else "model."
    bare = not any(name.startswith(prefix) for name in state)
    named = {
        f"{prefix}{name}" if bare and name != "lm_head.weight" else name: tensor
        for name, tensor in state.items()
    }
    remaining = {name: each for name, each in named.items() if not _NO_WEIGHTS.fullmatch(name)}
    if model.tie_embeddings and "lm_head.weight" in remaining:
        head = remaining.pop("lm_head.weight")
        embedding = remaining.get(_table(model)[0].theirs)
        if embedding is not None and not torch.equal(head, embedding):
            raise UserError(
                "tie_word_embeddings is true, but lm_head.weight differs from the embedding"
            )
    return remaining


def _table(model: ModelConfig) -> list[_Line]:
    """All lines of a model, the embedding first."""
    gpt2 = family_of(model) == "gpt2"
    top = "transformer." if gpt2 else "model."
    lines = [_Line(f"{top}{'wte' if gpt2 else 'embed_tokens'}.weight", _VOCABULARY[:1])]
    if gpt2:
        lines.append(_Line(f"{top}wpe.weight", ("embedding.position_embeddings.weight",)))
    for number in range(model.num_layers):
        ours = f"layers.{number}."
        if gpt2:
            lines += _gpt2_layer(f"{top}h.{number}.", ours)
        else:
            lines += _rope_layer(f"{top}layers.{number}.", ours, model)
    lines += _affine(f"{top}{'ln_f' if gpt2 else 'norm'}", "final_layernorm", bias=gpt2)
    if not model.tie_embeddings:
        lines.append(_Line("lm_head.weight", _VOCABULARY[1:]))
    return lines


def _affine(theirs: str, ours: str, *, bias: bool) -> list[_Line]:
    """A weight of the same shape on both sides, and perhaps a bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [_Line(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for kind in kinds]


def _conv1d(theirs: str, *ours: str) -> list[_Line]:
    """GPT-2's linear layer: the weight stored [inputs, outputs], and a bias."""
    weights = tuple(f"{name}.weight" for name in ours)
    biases = tuple(f"{name}.bias" for name in ours)
    return [_Line(f"{theirs}.weight", weights, transposed=True), _Line(f"{theirs}.bias", biases)]


def _gpt2_layer(theirs: str, ours: str) -> list[_Line]:
    qkv = [f"{ours}self_attention.linear_qkv.{part}" for part in "qkv"]
    return [
        *_affine(f"{theirs}ln_1", f"{ours}input_layernorm", bias=True),
        *_conv1d(f"{theirs}attn.c_attn", *qkv),
        *_conv1d(f"{theirs}attn.c_proj", f"{ours}self_attention.linear_proj"),
        *_affine(f"{theirs}ln_2", f"{ours}pre_mlp_layernorm", bias=True),
        *_conv1d(f"{theirs}mlp.c_fc", f"{ours}mlp.linear_fc1.up"),
        *_conv1d(f"{theirs}mlp.c_proj", f"{ours}mlp.linear_fc2"),
    ]


def _rope_layer(theirs: str, ours: str, model: ModelConfig) -> list[_Line]:
    lines = _affine(f"{theirs}input_layernorm", f"{ours}input_layernorm", bias=False)
    lines += _affine(f"{theirs}post_attention_layernorm", f"{ours}pre_mlp_layernorm", bias=False)
    attention, self_attention = f"{theirs}self_attn", f"{ours}self_attention"
    for part in "qkv":
        weight = f"{self_attention}.linear_qkv.{part}"
        lines += _affine(f"{attention}.{part}_proj", weight, bias=model.qkv_bias)
    lines += _affine(f"{attention}.o_proj", f"{self_attention}.linear_proj", bias=model.bias)
    for part in "qk" if model.qk_norm else "":
        lines += _affine(
            f"{attention}.{part}_norm", f"{self_attention}.{part}_layernorm", bias=False
        )
    linears = {
        "gate_proj": "linear_fc1.gate",
        "up_proj": "linear_fc1.up",
        "down_proj": "linear_fc2",
    }
    for their_name, our_name in linears.items():
        lines += _affine(f"{theirs}mlp.{their_name}", f"{ours}mlp.{our_name}", bias=model.bias)
    return lines


def _require_shapes(tensors: Mapping[str, Tensor], model: ModelConfig, vocab_size: int) -> None:
    """Refuses tensors that are not exactly the parameters of ``model``."""
    shapes = parameter_shapes(model, vocab_size)
    if missing := [name for name in shapes if name not in tensors]:
        raise UserError(f"the model lacks {_named(missing)}")
    if unknown := [name for name in tensors if name not in shapes]:
        raise UserError(f"the model holds {_named(unknown)}, which its configuration does not have")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}")


def _named(names: Iterable[str]) -> str:
    """The first few of some names."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
