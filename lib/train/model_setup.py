"""Builds this rank's part of the model: its chunks, sharded, initialised, with an optimizer's view.

The model is laid out on the meta device and gets memory only once it is sharded, so a rank never
holds more than its own shards and one whole parameter at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.layers.attention import attention_backend
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.model.flops import head_cost_in_layers
from lib.model.gpt import GPTModel, LossTerms, ModelOptions, StageSlice
from lib.model.initialization import initial_parts, with_first_rows
from lib.model.recompute import Recompute
from lib.parallel.collectives import all_reduce
from lib.parallel.data_parallel import DataParallel
from lib.parallel.groups import ParallelGroups
from lib.parallel.masters import create_masters, fill_shard
from lib.parallel.storage import Cut, named_parts
from lib.pipeline.partition import layer_ranges, partition_layers

Draw = Callable[..., Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class ShardedModel:
    """This rank's part of the model.

    Attributes:
        chunks: its chunks of layers, in order of depth; one unless stages are interleaved. They
            compute with copies of the parameters.
        parameters: the masters by global name: what is updated, counted and saved.
        cuts: how the tensor-parallel ranks hold each of them.
        tied_copies: names of parameters that are a copy of another stage's: they get the sum of
            both gradients, take the same steps, and count and are saved there.
        data_parallel: keeps what the chunks compute with, and sums gradients.
        mesh: the ranks.
    """

    chunks: nn.ModuleList
    parameters: dict[str, nn.Parameter]
    cuts: dict[str, Cut]
    tied_copies: frozenset[str]
    data_parallel: DataParallel
    mesh: DeviceMesh

    def chunk(self, number: int) -> GPTModel:
        """One of the chunks."""
        chunk = self.chunks[number]
        assert isinstance(chunk, GPTModel)
        return chunk

    def tied_copy_parameters(self) -> frozenset[nn.Parameter]:
        """The parameters that count on another stage."""
        return frozenset(self.parameters[name] for name in self.tied_copies)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that count and are saved on this rank."""
        held = self.parameters.items()
        return {name: value for name, value in held if name not in self.tied_copies}


def build_sharded_model(
    config: RunConfig,
    runtime: RuntimeConfig,
    groups: ParallelGroups,
    mesh: DeviceMesh,
    draw: Draw = initial_parts,
) -> ShardedModel:
    """The initialised model of this rank.

    Args:
        config: the run configuration.
        runtime: attention and recomputation.
        groups: of this rank on ``mesh``.
        mesh: from ``lib.parallel.mesh.build_mesh``.
        draw: gives the initial values, as ``initial_parts`` does.
    """
    dtype = COMPUTE_DTYPES[config.precision.compute]
    with torch.device("meta"):
        chunks = nn.ModuleList(_meta_chunks(config, runtime, groups))
    parts = {_name_of(chunks, name): part for name, part in named_parts(chunks)}
    cuts = {name: part.cut for name, part in parts.items()}
    masters = create_masters(cuts, mesh, torch.promote_types(dtype, torch.float32))
    vocab_size, seed = config.data.vocab_size, config.training.seed
    for name, part in draw(cuts, config.model, vocab_size=vocab_size, seed=seed):
        fill_shard(masters[name], part, mesh)
    models = [chunk for chunk in chunks if isinstance(chunk, GPTModel)]
    units = [chunk.units() for chunk in models]
    data_parallel = DataParallel(units, parts, masters, dtype, groups, config.parallel.sharding)
    copies = {chunk.global_name("output_layer.weight") for chunk in models if chunk.has_tied_copy}
    return ShardedModel(chunks, masters, cuts, frozenset(copies), data_parallel, mesh)


def fill_first_rows(
    model: ShardedModel, config: RunConfig, rows_of: Callable[[str], Tensor | None]
) -> None:
    """Puts given values over the initial ones; what is not given stays as it was drawn.

    Args:
        model: fresh from ``build_sharded_model``.
        config: the run configuration.
        rows_of: the first rows of a parameter by its global name; None to leave it as it is.
    """
    vocab_size, seed = config.data.vocab_size, config.training.seed
    for name, cut in model.cuts.items():
        rows = rows_of(name)
        if rows is not None:
            value = with_first_rows(
                rows, name, cut.full_shape, config.model, vocab_size=vocab_size, seed=seed
            )
            fill_shard(model.parameters[name], cut.part_of(value), model.mesh)


def sum_tied_gradients(model: ShardedModel, config: RunConfig, groups: ParallelGroups) -> None:
    """Adds up the gradients of a table that the first and the last pipeline stage share."""
    if not config.model.tie_embeddings or groups.embedding.size == 1:
        return
    gradient = model.parameters["embedding.word_embeddings.weight"].grad
    assert isinstance(gradient, DTensor)
    all_reduce(gradient.to_local(), groups.embedding)


def chunk_slices(config: RunConfig, stage: int, stages: int) -> list[StageSlice]:
    """Which layers and ends each chunk of a pipeline stage holds."""
    model, parallel = config.model, config.parallel
    chunks = stages * parallel.virtual_stages
    counts = parallel.layers_per_chunk
    if counts is None:
        padded = config.derived.padded_vocab_size
        head = head_cost_in_layers(model, config.training.seq_length, padded)
        counts = partition_layers(
            model.num_layers, chunks, first_extra=0.0, last_extra=head, stages=stages
        )
    return [
        StageSlice(
            layers,
            first=chunk == 0 and stage == 0,
            last=chunk == parallel.virtual_stages - 1 and stage == stages - 1,
        )
        for chunk, layers in enumerate(layer_ranges(counts, stage, stages))
    ]


def recompute_of(config: RunConfig, runtime: RuntimeConfig, groups: ParallelGroups) -> Recompute:
    """What the backward pass computes again."""
    model = config.model
    return Recompute(
        runtime.recompute,
        runtime.recompute_method,
        runtime.recompute_layers,
        groups.shard_stream,
        draws=model.hidden_dropout > 0 or model.attention_dropout > 0,
    )


def _meta_chunks(
    config: RunConfig, runtime: RuntimeConfig, groups: ParallelGroups
) -> list[GPTModel]:
    training = config.training
    options = ModelOptions(
        core=attention_backend(runtime.attention),
        recompute=recompute_of(config, runtime, groups),
        loss_terms=LossTerms(training.label_smoothing, training.z_loss),
        fused=runtime.kernels == "fused",
    )
    return [
        GPTModel(
            config.model,
            vocab_size=config.data.vocab_size,
            padded_vocab_size=config.derived.padded_vocab_size,
            groups=groups,
            part=part,
            options=options,
        )
        for part in chunk_slices(config, groups.pp.rank, groups.pp.size)
    ]


def _name_of(chunks: nn.ModuleList, name: str) -> str:
    """The global name of a parameter of the list of chunks."""
    number, _, inner = name.partition(".")
    chunk = chunks[int(number)]
    assert isinstance(chunk, GPTModel)
    return chunk.global_name(inner)
