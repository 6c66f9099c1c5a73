"""``outputs/run_config.json``: what pretraining consumes, with nothing left to derive.

``resolve`` makes it of the parameters and the facts of the tokenised corpus. The text is
deterministic, so that DVC sees a change only where there is one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError

from lib.config.batch_schedule import BatchSchedule
from lib.config.operation import CheckpointConfig
from lib.config.params_file import ParamsFile
from lib.config.schema import (
    ModelConfig,
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    ScheduleSection,
    Section,
    TrainingConfig,
    TrainingSection,
)
from lib.errors import UserError

_FFN_MULTIPLE = 64


class SplitRange(Section):
    """One split of the corpus: a contiguous range of documents."""

    documents: tuple[int, int]
    """First document and the one after the last."""

    tokens: int
    """Tokens of these documents, end-of-document tokens included."""

    samples: int
    """Samples of seq_length tokens in them: (tokens - 1) // seq_length, at least 0."""


class DataFacts(Section):
    """The tokenised corpus, as its manifest and its index describe it."""

    prefix: str
    """Path of the .bin and .idx without the ending."""

    tokens_sha256: str
    """sha256 of the .bin: another corpus is another run."""

    tokenizer_fingerprint: str
    """sha256 of the tokenizer that made the tokens."""

    vocab_size: int = Field(ge=1)
    """Token ids are 0 to vocab_size - 1."""

    eod_id: int = Field(ge=0)
    """Id of the end-of-document token."""

    dtype: Literal["uint8", "uint16", "int32", "int64"]
    """Number type of the .bin."""

    documents: int
    """Documents in all."""

    tokens: int
    """Tokens in all."""

    splits: dict[Literal["train", "valid", "test"], SplitRange]
    """The three splits."""


class DerivedNumbers(Section):
    """Numbers that follow from the rest, written down so that they can be read."""

    padded_vocab_size: int
    """Rows of the embedding: vocab_size rounded up to model.vocab_size_multiple."""

    num_parameters: int
    """Weights, without the padding rows of the vocabulary."""

    tokens_per_step: int
    """global_batch_size x seq_length; a ramp-up begins with fewer."""

    train_tokens: int
    """Tokens that training sees."""

    epochs: float
    """Passes over the training split."""


class InitialWeights(Section):
    """The weights that training starts from; all empty where they are drawn."""

    folder: str | None = None
    """Their folder, read once: when training starts at step 0."""

    sha256: str | None = None
    """sha256 of its weights: other weights are another run."""

    new_parts: tuple[str, ...] = ()
    """What the model has beyond them, drawn at random: layers, or rows of tables."""


_NO_WEIGHTS = InitialWeights()


class RunConfig(Section):
    """Everything that a training run is."""

    model: ModelConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    data: DataFacts
    derived: DerivedNumbers
    initial: InitialWeights = _NO_WEIGHTS

    def to_json(self) -> str:
        """The file's text: sorted keys, two spaces, one newline at the end."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what ``to_json`` wrote.

        Raises:
            UserError: the file is missing or is none of ours.
        """
        remedy = "run: dvc repro validate_config"
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"), strict=True)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; {remedy}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); {remedy}") from None
        except ValidationError as failure:
            error = failure.errors(include_url=False)[0]
            place = ".".join(map(str, error["loc"])) or "the text"
            raise UserError(
                f"{path}: {place}: {error['msg']}; written by another version? {remedy}"
            ) from None


@dataclass(frozen=True)
class Params:
    """The sections of params.yaml that a run configuration is made of, as written."""

    model: ModelSection
    precision: PrecisionConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleSection
    training: TrainingSection
    checkpoint: CheckpointConfig

    @classmethod
    def from_file(cls, params_file: ParamsFile) -> Self:
        """Reads the seven sections.

        Raises:
            InvalidParams: at the first section that is not sound.
        """
        return cls(
            model=params_file.section("model", ModelSection),
            precision=params_file.section("precision", PrecisionConfig),
            parallel=params_file.section("parallel", ParallelConfig),
            optimizer=params_file.section("optimizer", OptimizerConfig),
            schedule=params_file.section("schedule", ScheduleSection),
            training=params_file.section("training", TrainingSection),
            checkpoint=params_file.section("checkpoint", CheckpointConfig),
        )


def resolve(params: Params, facts: DataFacts, initial: InitialWeights = _NO_WEIGHTS) -> RunConfig:
    """The run configuration of parameters that break no rule of ``lib.config.rules``."""
    model = resolve_model(params.model, params.training.seq_length)
    training = resolve_training(params.training)
    train_samples_per_epoch = facts.splits["train"].samples
    return RunConfig(
        model=model,
        precision=params.precision,
        parallel=params.parallel,
        optimizer=params.optimizer,
        schedule=resolve_schedule(params.schedule, training),
        training=training,
        checkpoint=params.checkpoint,
        data=facts,
        derived=DerivedNumbers(
            padded_vocab_size=padded_size(facts.vocab_size, model.vocab_size_multiple),
            num_parameters=count_parameters(model, facts.vocab_size),
            tokens_per_step=training.global_batch_size * training.seq_length,
            train_tokens=training.train_samples * training.seq_length,
            epochs=training.train_samples / train_samples_per_epoch,
        ),
        initial=initial,
    )


def resolve_model(section: ModelSection, seq_length: int) -> ModelConfig:
    """Fills in the nulls of a model section."""
    hidden = section.hidden_size
    derived = {
        "num_query_groups": section.num_attention_heads,
        "head_dim": hidden // section.num_attention_heads,
        "ffn_hidden_size": default_ffn_size(section),
        "max_position_embeddings": seq_length,
        "qkv_bias": section.bias,
    }
    written = section.model_dump(exclude_none=True)
    return ModelConfig.model_validate({**derived, **written})


def default_ffn_size(section: ModelSection) -> int:
    """Width of the MLP where ``ffn_hidden_size`` is null."""
    hidden = section.hidden_size
    if section.activation == "swiglu":
        return padded_size(-(-8 * hidden // 3), _FFN_MULTIPLE)
    return 4 * hidden


def resolve_training(section: TrainingSection) -> TrainingConfig:
    """States the length of training in iterations and in samples."""
    samples = in_samples(section.train_iters, section.train_samples, section.global_batch_size)
    assert samples is not None, "a rule wants train_iters or train_samples"
    written = {"train_iters", "train_samples", "initial_weights", "new_parts"}
    shape = section.model_dump(exclude=written)
    iterations = BatchSchedule.of(section).iterations(samples)
    lengths = {"train_iters": iterations, "train_samples": samples}
    return TrainingConfig.model_validate({**shape, **lengths})


def resolve_schedule(section: ScheduleSection, training: TrainingConfig) -> ScheduleConfig:
    """States all lengths of a schedule in samples."""
    batch = training.global_batch_size
    decay = in_samples(section.decay_iters, section.decay_samples, batch)
    return ScheduleConfig(
        decay=section.decay,
        min_lr=section.min_lr,
        wsd_style=section.wsd_style,
        warmup_samples=in_samples(section.warmup_iters, section.warmup_samples, batch) or 0,
        decay_samples=training.train_samples if decay is None else decay,
        wsd_decay_samples=in_samples(section.wsd_decay_iters, section.wsd_decay_samples, batch)
        or 0,
    )


def in_samples(iterations: int | None, samples: int | None, batch: int) -> int | None:
    """A length that may be given in iterations or in samples, in samples; None if in neither."""
    return samples if iterations is None else iterations * batch


def padded_size(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Weights of the model, without padding rows of the vocabulary; tied ones count once."""
    hidden = model.hidden_size
    norm = hidden * (2 if model.normalization == "layernorm" else 1)
    total = vocab_size * hidden + model.num_layers * _layer_parameters(model, norm) + norm
    if model.position_embedding == "learned":
        total += model.max_position_embeddings * hidden
    if not model.tie_embeddings:
        total += vocab_size * hidden
    return total


def _layer_parameters(model: ModelConfig, norm: int) -> int:
    hidden, wide = model.hidden_size, model.ffn_hidden_size
    queries = model.num_attention_heads * model.head_dim
    qkv = queries + 2 * model.num_query_groups * model.head_dim
    into_mlp = wide * (2 if model.activation == "swiglu" else 1)
    matrices = hidden * (qkv + queries + into_mlp + wide)
    biases = qkv * model.qkv_bias + (hidden + into_mlp + hidden) * model.bias
    return 2 * norm + matrices + biases + 2 * model.head_dim * model.qk_norm
