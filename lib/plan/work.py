"""The training run that is planned, as plain numbers: what the formulas of this folder take."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lib.config.launch_plan import layout_for
from lib.config.operation import RuntimeConfig
from lib.config.run_config import Params, RunConfig, padded_size, phases_of, resolved_model
from lib.config.schema import ModelConfig, ParallelConfig
from lib.model.flops import head_cost_in_layers
from lib.pipeline.partition import partition_layers

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_DEFAULT_RUNTIME = RuntimeConfig()


@dataclass(frozen=True)
class Work:
    """One step of a run on one layout.

    Attributes:
        model: resolved.
        vocab_size: rows of the embedding table, padding included.
        seq_length: tokens of a sample.
        micro_batch_size: samples that a rank computes at once.
        micro_batches: of a step, on each copy of the model.
        parallel: the layout; ``data`` is a number.
        compute: number type of products and activations.
        runtime: recomputation, attention and kernels.
        within_documents: whether tokens see those of their own document only.
    """

    model: ModelConfig
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    micro_batches: int
    parallel: ParallelConfig
    compute: str = "bf16"
    runtime: RuntimeConfig = _DEFAULT_RUNTIME
    within_documents: bool = False

    @property
    def copies(self) -> int:
        """Copies of the model."""
        assert self.parallel.data is not None
        return self.parallel.data

    @property
    def shards(self) -> int:
        """Ranks that share the masters."""
        return self.parallel.data_shard or self.copies

    @property
    def ranks(self) -> int:
        """Of the whole run."""
        return self.parallel.processes

    @property
    def sharding(self) -> str:
        """As it is carried out: a rank that holds all masters has nothing to shard."""
        return self.parallel.sharding if self.shards > 1 else "optimizer"

    @property
    def element_bytes(self) -> int:
        """Bytes of a number of the compute type."""
        return _ELEMENT_BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        """Bytes of a number of masters, moments and gradient sums: fp32 or wider."""
        return max(4, self.element_bytes)

    @property
    def tokens(self) -> int:
        """Of a micro batch, S x B."""
        return self.seq_length * self.micro_batch_size

    @property
    def own_tokens(self) -> int:
        """Of a micro batch, as this rank holds hidden states between layers, S x B (/ T)."""
        return self.tokens // (self.parallel.tensor if self.parallel.sequence else 1)

    @property
    def tokens_per_step(self) -> int:
        """Over all copies."""
        return self.tokens * self.micro_batches * self.copies

    @cached_property
    def layers_of_chunks(self) -> tuple[int, ...]:
        """Layers of each chunk of the pipeline, in order of depth."""
        parallel = self.parallel
        if parallel.layers_per_chunk is not None:
            return parallel.layers_per_chunk
        head = head_cost_in_layers(self.model, self.seq_length, self.vocab_size)
        chunks = parallel.pipeline * parallel.virtual_stages
        return _partition(self.model.num_layers, chunks, head, parallel.pipeline)


@lru_cache(maxsize=1024)
def _partition(layers: int, chunks: int, head: float, stages: int) -> tuple[int, ...]:
    return partition_layers(layers, chunks, last_extra=head, stages=stages)


def works_of(
    config: RunConfig | Params, runtime: RuntimeConfig, vocab_size: int, processes: int
) -> list[Work]:
    """What each phase of a run comes to over so many processes.

    Args:
        config: the run, or the sections that it is made of, which break no rule.
        runtime: section ``runtime``.
        vocab_size: real tokens.
        processes: of all nodes together.

    Raises:
        UserError: the processes or the batch do not divide.
    """
    layout = layout_for(config, processes)
    model = resolved_model(config)
    samples = config.training.global_batch_size // layout.data
    return [
        Work(
            model=model,
            vocab_size=padded_size(vocab_size, model.vocab_size_multiple),
            seq_length=phase.seq_length,
            micro_batch_size=phase.micro_batch_size,
            micro_batches=samples // phase.micro_batch_size,
            parallel=config.parallel.model_copy(update={"data": layout.data}),
            compute=config.precision.compute,
            runtime=runtime,
            within_documents=config.data.attention == "document",
        )
        for phase in phases_of(config)
    ]
