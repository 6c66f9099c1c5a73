"""How many numbers each block of parameters holds on a rank: ``lib.parallel.compute_block``.

A block is a layer, or an end of the model. Each parameter that layers compute with is padded to
128 elements; each stored one of h rows and c columns is cut into R shards of ceil(h / R) rows:

    values     sum of the parameters, padded
    width      sum of ceil(h / R) c over the stored ones: a shard of the masters

T tensor-parallel ranks hold h = rows / T, or all rows where there are fewer key and value heads
than ranks: then each computes with one head of them. H hidden, F feed-forward width, V rows of the
vocabulary, N query heads, G key and value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lib.config.schema import ModelConfig
from lib.plan.work import Work

_ALIGNMENT = 128


@dataclass(frozen=True)
class Stored:
    """A stored parameter on one tensor-parallel rank.

    Attributes:
        held_rows: in its master, before the copies of the model share it.
        used_rows: that the rank computes with.
        columns: entries of a row.
    """

    held_rows: int
    used_rows: int
    columns: int


Parameter = tuple[Stored, ...]  # what lies one below the other in one tensor


@dataclass(frozen=True)
class BlockSize:
    """Elements of a block on one rank.

    Attributes:
        values: of the flat buffer of parameters, and of that of gradients.
        width: of one shard of the masters.
        has_own_sum: whether the reduced gradients have memory of their own.
        lasts: whether its parameters and gradients stay while its chunk is at work.
    """

    values: int
    width: int
    has_own_sum: bool
    lasts: bool


def block_size(parameters: Sequence[Parameter], shards: int, *, lasts: bool) -> BlockSize:
    """The sizes of a block whose masters so many ranks share."""
    values = sum(
        _round_up(sum(part.used_rows * part.columns for part in parts)) for parts in parameters
    )
    stored = [part for parts in parameters for part in parts]
    width = sum(-(-part.held_rows // shards) * part.columns for part in stored)
    is_cut = any(part.used_rows != part.held_rows for part in stored)
    return BlockSize(values, width, shards > 1 or is_cut, lasts)


def chunk_blocks(work: Work, chunk: int) -> tuple[BlockSize, ...]:
    """The blocks of a chunk of the pipeline, by its place in the whole chain."""
    layers = work.layers_of_chunks
    ends = (chunk == 0, chunk == len(layers) - 1)
    sizes = (work.vocab_size, work.parallel.tensor, work.shards)
    return _chunk_blocks(work.model, sizes, layers[chunk], ends)


@lru_cache(maxsize=4096)
def _chunk_blocks(
    model: ModelConfig, sizes: tuple[int, int, int], layers: int, holds: tuple[bool, bool]
) -> tuple[BlockSize, ...]:
    (vocab_size, tensor, shards), (is_first, is_last) = sizes, holds
    table = _same(vocab_size // tensor, model.hidden_size)
    blocks = [block_size(layer_parameters(model, tensor), shards, lasts=False)] * layers
    if is_first:
        ends = [table]
        if model.position_embedding == "learned":
            ends.append(_same(model.max_position_embeddings, model.hidden_size))
        blocks.insert(0, block_size(ends, shards, lasts=True))
    if is_last:
        has_own_table = not is_first or not model.tie_embeddings
        ends = [*_norm(model), *([table] if has_own_table else [])]
        blocks.append(block_size(ends, shards, lasts=True))
    return tuple(blocks)


def layer_parameters(model: ModelConfig, tensor: int) -> list[Parameter]:
    """What a layer computes with on one of ``tensor`` ranks."""
    hidden, size = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * size, _keys(model, tensor)
    wide = model.ffn_hidden_size // tensor
    parts = 2 if model.activation == "swiglu" else 1

    def qkv(columns: int) -> Parameter:
        key = Stored(keys[0], keys[1], columns)
        return (Stored(queries // tensor, queries // tensor, columns), key, key)

    def up(columns: int) -> Parameter:
        return (Stored(wide, wide, columns),) * parts

    found = [qkv(hidden), _same(hidden, queries // tensor), up(hidden), _same(hidden, wide)]
    if model.qkv_bias:
        found.append(qkv(1))
    if model.bias:
        found += [_same(hidden, 1), up(1), _same(hidden, 1)]
    if model.qk_norm:
        found += [_same(size, 1)] * 2
    return found + _norm(model) * 2


def _keys(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Rows of keys (or values) that a rank holds, and that it computes with."""
    groups, size = model.num_query_groups, model.head_dim
    if groups % tensor == 0:
        return groups // tensor * size, groups // tensor * size
    return groups * size, size


def _norm(model: ModelConfig) -> list[Parameter]:
    return [_same(model.hidden_size, 1)] * (2 if model.normalization == "layernorm" else 1)


def _same(rows: int, columns: int) -> Parameter:
    return (Stored(rows, rows, columns),)


def _round_up(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
