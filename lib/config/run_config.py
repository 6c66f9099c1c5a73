"""``outputs/run_config.json``: what pretraining consumes, with nothing left to derive.

``resolve`` makes it of the parameters and the facts of the tokenised corpus. The text is
deterministic, so that DVC sees a change only where there is one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from lib.config.batch_schedule import BatchSchedule
from lib.config.data_facts import DataFacts, Phase, TokensFacts, resolve_data
from lib.config.data_section import DataSection, PlannedPhase, planned_phases
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
    TrainingShape,
)
from lib.errors import UserError

_FFN_MULTIPLE = 64


class DerivedNumbers(Section):
    """Numbers that follow from the rest, written down so that they can be read."""

    padded_vocab_size: int
    """Rows of the embedding: vocab_size rounded up to model.vocab_size_multiple."""

    num_parameters: int
    """Weights, without the padding rows of the vocabulary."""

    tokens_per_step: int
    """global_batch_size x seq_length; a ramp-up begins with fewer, a later phase may have more."""

    train_tokens: int
    """Tokens that training sees, in all phases."""

    epochs: float
    """Passes over the training documents of the corpus that is read most often."""


class InitialWeights(Section):
    """The weights that training starts from; all empty where they are drawn."""

    folder: str | None = None
    """Their folder, read once: when training starts at step 0."""

    sha256: str | None = None
    """sha256 of its weights: other weights are another run."""

    new_parts: tuple[str, ...] = ()
    """What the model has beyond them, drawn at random: layers, or rows of tables."""


_NO_WEIGHTS = InitialWeights()
_BY_SIZE = DataSection()


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

    @property
    def longest_seq_length(self) -> int:
        """Tokens of the longest sample of any phase."""
        return max(phase.seq_length for phase in self.data.phases)

    def phase_at(self, consumed_samples: int) -> Phase:
        """The phase of the sample that follows ``consumed_samples``."""
        return self.data.phases[self.data.phase_index_at(consumed_samples)]

    def before_phase(self, index: int) -> Self:
        """The run that this one is without its phases from ``index`` (at least 1) on.

        Its fingerprint is that of a run whose parameters never had these phases: corpora that only
        they read have no weight in it, and so no part in the fingerprint.
        """
        data = self.data.model_copy(update={"phases": self.data.phases[:index]})
        return self.model_copy(update={"data": data})

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
    data: DataSection = _BY_SIZE
    corpora: tuple[str, ...] | None = None
    """Names of the section ``corpora``; None takes all corpora that there are tokens of."""

    @classmethod
    def from_file(cls, params_file: ParamsFile) -> Self:
        """Reads the sections; of ``corpora`` the names are enough.

        Raises:
            InvalidParams: at the first section that is not sound.
        """
        corpora = params_file.plain("corpora")
        return cls(
            model=params_file.section("model", ModelSection),
            precision=params_file.section("precision", PrecisionConfig),
            parallel=params_file.section("parallel", ParallelConfig),
            optimizer=params_file.section("optimizer", OptimizerConfig),
            schedule=params_file.section("schedule", ScheduleSection),
            training=params_file.section("training", TrainingSection),
            checkpoint=params_file.section("checkpoint", CheckpointConfig),
            data=params_file.section("data", DataSection),
            corpora=tuple(corpora) if isinstance(corpora, dict) else None,
        )

    @property
    def longest_seq_length(self) -> int:
        """Tokens of the longest sample of any phase."""
        return longest_seq_length(self.training, self.data)

    def without_dropout(self) -> Self:
        """The same run without dropout, whose masks no two layouts share, and no baseline has."""
        still = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
        return replace(self, model=self.model.model_copy(update=still))


def resolved_model(config: RunConfig | Params) -> ModelConfig:
    """The model with its nulls filled in."""
    if isinstance(config, RunConfig):
        return config.model
    return resolve_model(config.model, config.longest_seq_length)


def phases_of(config: RunConfig | Params) -> Sequence[Phase | PlannedPhase]:
    """The parts of the training in their order, each with its lengths."""
    if isinstance(config, RunConfig):
        return config.data.phases
    return planned_phases(config.training, config.data)


def resolve(
    params: Params, tokens: TokensFacts, initial: InitialWeights = _NO_WEIGHTS
) -> RunConfig:
    """The run configuration of parameters that break no rule of ``lib.config.rules``.

    Args:
        params: the sections.
        tokens: facts of all corpora that are read; those of another run configuration
            (``DataFacts``) serve where they hold these corpora.
        initial: the weights to start from.
    """
    model = resolve_model(params.model, params.longest_seq_length)
    training = resolve_training(params.training)
    corpora = tuple(tokens.corpora) if params.corpora is None else params.corpora
    facts = resolve_data(training, params.data, corpora, tokens)
    samples = training.train_samples
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
            train_tokens=facts.tokens_before(samples),
            epochs=max(facts.passes(samples).values()),
        ),
        initial=initial,
    )


def longest_seq_length(training: TrainingShape, data: DataSection) -> int:
    """Tokens of the longest sample of any phase."""
    return max(phase.seq_length for phase in planned_phases(training, data))


def resolve_model(section: ModelSection, seq_length: int) -> ModelConfig:
    """Fills in the nulls of a model section; ``seq_length`` is the longest of all phases."""
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
