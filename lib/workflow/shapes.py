"""The reference models that speed is measured on, and layouts of them that fit a machine's GPUs.

| name | layers | hidden | heads | MLP | kind | parameters | tokens of a sample |
|---|---|---|---|---|---|---|---|
| 125m | 12 | 768 | 12 x 64 | 3072 | GPT-2 | 124 M | 1024 |
| 1.4b | 24 | 2048 | 16 x 128 | 5504 | Llama | 1.42 B | 2048 |
| 7b | 32 | 4096 | 32 x 128 | 11008 | Llama | 6.89 B | 2048 |
"""

from dataclasses import dataclass, replace
from typing import Literal

from lib.config.data_section import DataSection
from lib.config.launch_plan import layout_for
from lib.config.operation import CheckpointConfig, RuntimeConfig
from lib.config.rules import broken_rules
from lib.config.run_config import Params, count_parameters, resolve_model
from lib.config.schema import (
    ModelConfig,
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.errors import InvalidParams
from lib.plan.memory import USABLE, peak_memory
from lib.plan.work import works_of

_LONG = 1_000_000
_RATE = 1e-4
_DOCUMENT_TOKENS = 70

Compute = Literal["fp32", "bf16", "fp16", "fp64"]


@dataclass(frozen=True)
class Shape:
    """A model, and the batches that it is trained with.

    Attributes:
        name: as ``--shape`` takes it.
        model: as section ``model``.
        vocab_size: tokens are drawn from so many.
        seq_length: tokens of a sample.
        micro_batch_size: samples computed at once, at most.
        micro_batches: of a step, on each rank.
    """

    name: str
    model: ModelSection
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    micro_batches: int = 4

    def resolved(self) -> ModelConfig:
        """The model with every null filled in."""
        return resolve_model(self.model, self.seq_length)

    def num_parameters(self) -> int:
        """Weights, without padding rows of the vocabulary."""
        return count_parameters(self.resolved(), self.vocab_size)


def _llama(layers: int, hidden: int, heads: int, wide: int) -> ModelSection:
    return ModelSection(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=wide,
        position_embedding="rope",
        normalization="rmsnorm",
        activation="swiglu",
        bias=False,
        tie_embeddings=False,
    )


_GPT2 = ModelSection(num_layers=12, hidden_size=768, num_attention_heads=12)
REFERENCES = {
    shape.name: shape
    for shape in (
        Shape("125m", _GPT2, 50304, seq_length=1024, micro_batch_size=16),
        Shape("1.4b", _llama(24, 2048, 16, 5504), 50304, seq_length=2048, micro_batch_size=8),
        Shape("7b", _llama(32, 4096, 32, 11008), 50304, seq_length=2048, micro_batch_size=2),
    )
}


def fitted(shape: Shape, layout: ParallelConfig, memory: int) -> Shape | None:
    """The shape with the largest micro batch that fits, halved from its own; None if none does."""
    size = shape.micro_batch_size
    while size:
        smaller = replace(shape, micro_batch_size=size)
        run = measured_run(smaller, layout, "bf16")
        (work,) = works_of(run, RuntimeConfig(), shape.vocab_size, layout.processes)
        if peak_memory(work).kinds.total <= USABLE * memory:
            return smaller
        size //= 2
    return None


def usual_layouts(shape: Shape, gpus: int, memory: int) -> list[tuple[Shape, ParallelConfig]]:
    """One GPU and all GPUs, each with the largest micro batch that fits.

    All GPUs hold copies where these fit; else as few as possible share each layer, which also
    divides the sequence.

    Args:
        shape: a reference.
        gpus: in this machine.
        memory: of the smallest, in bytes.
    """
    found: list[tuple[Shape, ParallelConfig]] = []
    for wanted in sorted({1, gpus}):
        for tensor in (1, 2, 4, 8):
            if wanted % tensor:
                continue
            layout = ParallelConfig(tensor=tensor, data=wanted // tensor, sequence=tensor > 1)
            smaller = fitted(shape, layout, memory)
            if smaller is not None:
                found.append((smaller, layout))
                break
    return found


def measured_run(shape: Shape, layout: ParallelConfig, compute: Compute) -> Params:
    """The sections of a run that is long enough for any measurement.

    Args:
        shape: the model and its batches.
        layout: ``data`` must be a number.
        compute: number type.

    Raises:
        InvalidParams: the layout cannot divide the model.
    """
    assert layout.data is not None
    training = TrainingSection(
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
        global_batch_size=shape.micro_batch_size * shape.micro_batches * layout.data,
        train_iters=_LONG,
    )
    run = Params(
        model=shape.model,
        precision=PrecisionConfig(compute=compute),
        parallel=layout,
        optimizer=OptimizerConfig(lr=_RATE),
        schedule=ScheduleSection(decay="constant"),
        training=training,
        checkpoint=CheckpointConfig(),
        data=DataSection(),
        corpora=("random",),
    )
    sections = {"model": run.model, "parallel": layout, "training": training}
    if problems := broken_rules(sections | {"vocab_size": shape.vocab_size}):
        raise InvalidParams(problems)
    layout_for(run, layout.processes)
    return run


def documents_for(shape: Shape, steps: int, copies: int) -> int:
    """Documents of random tokens for so many steps; for very many they are read again."""
    tokens = steps * copies * shape.micro_batches * shape.micro_batch_size * shape.seq_length
    return 200 + shape.seq_length + min(50_000, tokens // _DOCUMENT_TOKENS)
