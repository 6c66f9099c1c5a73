"""Initial weights that do not depend on the layout.

Each parameter is drawn whole from a generator of its own, keyed by the seed and the parameter's
global name, and then cut: any layout starts from the same model. A run that starts from existing
weights draws what they lack in the same way.

| parameter | value |
|---|---|
| matrices and embeddings | N(0, std), std = 0.02 by default |
| projections back into the residual stream (linear_proj, linear_fc2) | N(0, std / sqrt(2 L)) |
| norm weights | 1 |
| biases | 0 |
| padding rows of the vocabulary | 0 |

The scale of the projections keeps the residual stream's variance level over 2 L additions
(Radford et al., GPT-2; also Megatron's).
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lib.config.schema import ModelConfig
from lib.model.gpt import GPTModel
from lib.parallel.random import named_generator
from lib.parallel.storage import Cut, named_parts

_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY_TABLES = ("word_embeddings.weight", "output_layer.weight")


def initial_value(
    name: str, shape: tuple[int, ...], config: ModelConfig, *, vocab_size: int, seed: int
) -> Tensor:
    """The whole initial value of one parameter, fp32 on the CPU.

    Args:
        name: the parameter's global name.
        shape: its shape without any parallelism.
        config: the resolved ``model`` section.
        vocab_size: real vocabulary; later rows of its tables are zero.
        seed: ``training.seed``.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    std = config.init_std
    if name.endswith(_OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * config.num_layers)
    value = torch.zeros(shape)
    rows = vocab_size if name.endswith(_VOCABULARY_TABLES) else shape[0]
    value[:rows].normal_(0.0, std, generator=named_generator(seed, "init", name))
    return value


def with_first_rows(
    rows: Tensor,
    name: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    *,
    vocab_size: int,
    seed: int,
) -> Tensor:
    """The whole initial value of one parameter, whose first rows are given.

    Args:
        rows: the first rows, as many as are given: perhaps all of them.
        name: as for ``initial_value``, like all that follow.
        shape: the parameter's shape, padding rows included.
        config: the resolved ``model`` section.
        vocab_size: real vocabulary.
        seed: ``training.seed``.
    """
    if tuple(rows.shape) == shape:
        return rows
    value = initial_value(name, shape, config, vocab_size=vocab_size, seed=seed)
    value[: rows.shape[0]] = rows
    return value


def initial_parts(
    cuts: Mapping[str, Cut], config: ModelConfig, *, vocab_size: int, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensor-parallel part of every initial value, one at a time, fp32 on the CPU.

    Args:
        cuts: how each parameter is held, by its global name.
        config: the resolved ``model`` section.
        vocab_size: real vocabulary.
        seed: ``training.seed``.
    """
    for name, cut in cuts.items():
        value = initial_value(name, cut.full_shape, config, vocab_size=vocab_size, seed=seed)
        yield name, cut.part_of(value)


@torch.no_grad()
def initialize(model: GPTModel, config: ModelConfig, *, vocab_size: int, seed: int) -> None:
    """Fills every parameter of a model that is not sharded yet with its initial value."""
    parts = {model.global_name(name): part for name, part in named_parts(model)}
    cuts = {name: part.cut for name, part in parts.items()}
    for name, held in initial_parts(cuts, config, vocab_size=vocab_size, seed=seed):
        parts[name].value.copy_(cuts[name].used_of(held))
