"""Rules on how the model is laid over processes; see ``lib.config.rules``.

Where ``parallel.data`` is null the number of copies is known at launch only, and
``lib.config.launch_plan`` checks it; here what no number of copies could make good is refused.
"""

from collections.abc import Iterator

from lib.config.nearest import divisors, divisors_near, multiples_near, nearest_of
from lib.config.operation import LaunchConfig
from lib.config.run_config import default_ffn_size, padded_size
from lib.config.schema import ModelSection, ParallelConfig, TrainingSection
from lib.errors import Problem

# ---- tensor parallelism


def layers_divide_by_tensor(model: ModelSection, parallel: ParallelConfig) -> Iterator[Problem]:
    """Tensor parallelism cuts heads and the MLP into equal parts."""
    tensor, wide = parallel.tensor, model.ffn_hidden_size
    derived = default_ffn_size(model)
    sizes = (
        ("num_attention_heads", model.num_attention_heads, str(model.num_attention_heads)),
        ("ffn_hidden_size", wide or derived, str(wide or f"null ({derived}, from hidden_size)")),
    )
    for name, size, text in sizes:
        if size % tensor:
            yield Problem(
                f"model.{name}",
                text,
                f"must be divisible by parallel.tensor = {tensor}",
                f"nearest: {multiples_near(size, tensor)}; or parallel.tensor: "
                f"{divisors_near(tensor, size)}",
            )


def vocabulary_divides_by_tensor(
    model: ModelSection, parallel: ParallelConfig, vocab_size: int
) -> Iterator[Problem]:
    """Tensor parallelism cuts the rows of the embedding, padding included, into equal parts."""
    tensor, multiple = parallel.tensor, model.vocab_size_multiple
    padded = padded_size(vocab_size, multiple)
    if padded % tensor:
        yield Problem(
            "model.vocab_size_multiple",
            str(multiple),
            f"pads the vocabulary of {vocab_size} tokens to {padded} rows, which must be divisible "
            f"by parallel.tensor = {tensor}",
            f"nearest: {multiples_near(multiple, tensor)}; or parallel.tensor: "
            f"{divisors_near(tensor, padded)}",
        )


def query_groups_divide_by_tensor(
    model: ModelSection, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Key and value heads are dealt out to the shards, or each is copied to equally many."""
    heads, groups, tensor = model.num_attention_heads, model.num_query_groups, parallel.tensor
    if groups is None or groups % tensor == 0 or tensor % groups == 0:
        return
    legal = [n for n in divisors(heads) if n % tensor == 0 or tensor % n == 0]
    yield Problem(
        "model.num_query_groups",
        str(groups),
        f"must be a multiple or a divisor of parallel.tensor = {tensor}",
        f"nearest: {nearest_of(groups, legal)}",
    )


def sequence_parallelism_needs_tensor(parallel: ParallelConfig) -> Iterator[Problem]:
    """The processes of ``tensor`` are those that share the sequence."""
    if parallel.sequence and parallel.tensor == 1:
        yield Problem(
            "parallel.sequence",
            "true",
            "needs parallel.tensor above 1, which is 1",
            "write false, or parallel.tensor: 2",
        )


def sequence_divides_by_tensor(
    training: TrainingSection, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Sequence parallelism cuts the sequence into equal parts."""
    length, tensor = training.seq_length, parallel.tensor
    if parallel.sequence and length % tensor:
        yield Problem(
            "training.seq_length",
            str(length),
            f"must be divisible by parallel.tensor = {tensor} with parallel.sequence: true",
            f"nearest: {multiples_near(length, tensor)}; or parallel.sequence: false",
        )


# ---- pipeline parallelism


def every_chunk_has_a_layer(model: ModelSection, parallel: ParallelConfig) -> Iterator[Problem]:
    """A stage without a layer would only wait."""
    layers, stages, chunks = model.num_layers, parallel.pipeline, parallel.virtual_stages
    if stages * chunks <= layers:
        return
    field, value, other = "pipeline", stages, chunks
    if stages <= layers:
        field, value, other = "virtual_stages", chunks, stages
    product = f"parallel.pipeline x virtual_stages = {stages} x {chunks}"
    yield Problem(
        f"parallel.{field}",
        str(value),
        f"{product} must be at most model.num_layers = {layers}",
        f"write {max(1, layers // other)} or less, or num_layers: {stages * chunks} or more",
    )


def virtual_stages_need_a_pipeline(parallel: ParallelConfig) -> Iterator[Problem]:
    """One process alone never waits for another."""
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        yield Problem(
            "parallel.virtual_stages",
            str(parallel.virtual_stages),
            "needs parallel.pipeline above 1, which is 1",
            "write 1, or parallel.pipeline: 2",
        )


def layers_per_chunk_make_the_model(
    model: ModelSection, parallel: ParallelConfig
) -> Iterator[Problem]:
    """An explicit split names each layer once."""
    split = parallel.layers_per_chunk
    if split is None:
        return
    stages, chunks = parallel.pipeline, parallel.virtual_stages
    text = f"[{', '.join(map(str, split))}]"
    if len(split) != stages * chunks:
        yield Problem(
            "parallel.layers_per_chunk",
            text,
            f"has {len(split)} numbers, but parallel.pipeline x virtual_stages = "
            f"{stages} x {chunks} makes {stages * chunks} chunks",
            f"write {stages * chunks} numbers, or null",
        )
    if sum(split) != model.num_layers:
        yield Problem(
            "parallel.layers_per_chunk",
            text,
            f"adds up to {sum(split)}, but model.num_layers = {model.num_layers}",
            f"write numbers that add up to {model.num_layers}, or null",
        )


# ---- data parallelism and nodes


def data_shard_divides_data(parallel: ParallelConfig) -> Iterator[Problem]:
    """Copies come in groups of equal size, each of which splits the state."""
    shard, data = parallel.data_shard, parallel.data
    if shard is not None and data is not None and data % shard:
        yield Problem(
            "parallel.data_shard",
            str(shard),
            f"must divide parallel.data = {data}",
            f"nearest: {divisors_near(shard, data)}; or null for all",
        )


def node_rank_is_one_of_the_nodes(launch: LaunchConfig) -> Iterator[Problem]:
    """Nodes are numbered from 0."""
    rank, nodes = launch.node_rank, launch.nodes
    if rank is not None and nodes is not None and rank >= nodes:
        yield Problem(
            "launch.node_rank",
            str(rank),
            f"must be below launch.nodes = {nodes}",
            f"write 0 to {nodes - 1}" if nodes > 1 else "write 0 or null",
        )


LAYOUT_RULES = (
    layers_divide_by_tensor,
    vocabulary_divides_by_tensor,
    query_groups_divide_by_tensor,
    sequence_parallelism_needs_tensor,
    sequence_divides_by_tensor,
    every_chunk_has_a_layer,
    virtual_stages_need_a_pipeline,
    layers_per_chunk_make_the_model,
    data_shard_divides_data,
    node_rank_is_one_of_the_nodes,
)
