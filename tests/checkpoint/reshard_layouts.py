"""Eight layouts of up to eight ranks that together hold every kind; the models; what ranks give.

Ranks know test modules by path, so the classes of their results live here, in a module with a name.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lib.config.data_section import DataSection
from lib.config.operation import CheckpointConfig
from lib.config.run_config import Params, RunConfig, resolve
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.train.comparison import with_layout
from lib.train.random_tokens import random_tokens

VOCABULARY = 301  # padded to 304 rows
BEFORE, AFTER = 2, 1  # steps until the checkpoint, and from there to the end


def _layout(tensor, pipeline, data, **others):
    return ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, **others)


# Four layers; a name says tensor (s: sequence parallel), pipeline x chunks, data / shards.
LAYOUTS = {
    "one": _layout(1, 1, 1),
    "dp3": _layout(1, 1, 3, sharding="parameters"),
    "dp4/2": _layout(1, 1, 4, sharding="gradients", data_shard=2),
    "tp2s-dp2": _layout(2, 1, 2, sequence=True),
    "pp4": _layout(1, 4, 1),
    "tp2-pp2x2-dp2": _layout(2, 2, 2, virtual_stages=2, sharding="gradients"),
    "tp4-pp2": _layout(4, 2, 1, layers_per_chunk=(3, 1)),
    "tp4s-dp2": _layout(4, 1, 2, sequence=True, sharding="parameters"),
}
# Samples that a rank computes at once: few micro batches, but more than one for most.
_MICRO_BATCHES = {"one": 4, "dp3": 2, "dp4/2": 1, "tp2s-dp2": 3, "tp4-pp2": 4, "tp4s-dp2": 6}

# As GPT-2, one table at both ends; and as Llama, with fewer key and value heads than tensor ranks.
FAMILIES = {
    "gpt2": {},
    "llama": {
        "bias": False,
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "num_query_groups": 2,
        "tie_embeddings": False,
    },
}
# For a model none of whose tensors has more than two rows: the third rank's shards are empty.
NARROW = {f"narrow-dp{data}": _layout(1, 1, data) for data in (1, 2, 3, 4)}
ALL = LAYOUTS | NARROW


@dataclass(frozen=True)
class Saved:
    """Where a layout saves a run: a checkpoint without dropout and one with it."""

    plain: Path
    dropout: Path


@dataclass(frozen=True)
class End:
    """What a run came to.

    Attributes:
        losses: of the last steps.
        norms: gradient norms of these steps.
        tensors: weights and moments after them, whole, by their names in a checkpoint.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Course:
    """How one rank's run with dropout went on from a checkpoint, to the last bit.

    Attributes:
        place: ranks along pipeline, data and tensor.
        streams: digest of each random stream at the checkpoint.
        figures: losses and norms of the steps after it.
        digest: of all that the rank holds at the end, streams included.
    """

    place: tuple[int, int, int]
    streams: dict[str, str]
    figures: list[float]
    digest: str


def families_on(layout: str) -> tuple[str, ...]:
    """The models that are laid out so."""
    return ("narrow",) if layout in NARROW else tuple(FAMILIES)


def family_of_pair(source: str, target: str) -> str:
    """The model to try a pair with: each layout saves and loads each model for half of all."""
    families, names = families_on(target), list(ALL)
    return families[(names.index(source) + names.index(target)) % len(families)]


def processes_of(layout: str) -> int:
    return ALL[layout].processes


def config_of(folder: Path, family: str) -> RunConfig:
    """The run of a model on one rank."""
    if family == "narrow":
        sizes = {"num_layers": 1, "hidden_size": 2, "num_attention_heads": 1, "ffn_hidden_size": 2}
        model = ModelSection(vocab_size_multiple=2, init_std=0.5, **sizes)
        return _resolve(folder, model, seq_length=2, vocabulary=2)
    model = ModelSection(
        num_layers=4,
        hidden_size=24,
        num_attention_heads=4,
        head_dim=4,
        ffn_hidden_size=32,
        vocab_size_multiple=8,
        init_std=0.1,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        **FAMILIES[family],
    )
    return _resolve(folder, model, seq_length=8, vocabulary=VOCABULARY)


def laid_out(config: RunConfig, layout: str) -> RunConfig:
    """The same run on one of the layouts."""
    size = _MICRO_BATCHES.get(layout, 2 if layout in LAYOUTS else 1)
    update = {"micro_batch_size": size}
    training = config.training.model_copy(update=update)
    phases = tuple(phase.model_copy(update=update) for phase in config.data.phases)
    data = config.data.model_copy(update={"phases": phases})
    laid_out = with_layout(config, ALL[layout])
    return laid_out.model_copy(update={"training": training, "data": data})


def _resolve(folder: Path, model: ModelSection, *, seq_length: int, vocabulary: int) -> RunConfig:
    training = TrainingSection(
        seq_length=seq_length,
        micro_batch_size=1,
        global_batch_size=12,
        train_iters=BEFORE + 3,
        split="90,5,5",
    )
    params = Params(
        model,
        PrecisionConfig(compute="fp64"),
        ParallelConfig(),
        OptimizerConfig(lr=1e-2, clip_grad=0.5),
        ScheduleSection(warmup_iters=2),
        training,
        CheckpointConfig(),
        DataSection(),
        ("one", "two"),
    )
    return resolve(params, random_tokens(folder, params, vocabulary, 60))


def kinds() -> dict[str, set[object]]:
    """What the layouts hold of each kind."""
    layouts = LAYOUTS.values()
    return {
        "tensor": {each.tensor for each in layouts},
        "pipeline": {each.pipeline for each in layouts},
        "data": {each.data for each in layouts},
        "chunks": {each.virtual_stages for each in layouts},
        "sharding": {each.sharding for each in layouts},
        "sequence": {each.sequence for each in layouts},
        "split by hand": {each.layers_per_chunk is not None for each in layouts},
        "replicas": {each.data_shard is not None for each in layouts},
        "processes": {processes_of(name) for name in LAYOUTS},
    }
