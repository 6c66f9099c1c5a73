"""The section ``data`` of params.yaml: which corpora are trained on, when, and in which shares.

``planned_phases`` says what it means before a token was read: the parts of a training, each with
its blend and its lengths. ``lib.config.data_facts`` adds what the corpora hold.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lib.config.schema import Section, TrainingShape

_NAME = re.compile(r"[a-z][a-z0-9_]*")  # as those of the section corpora

Blend = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class PhaseSection(Section):
    """A later part of a training: what changes when it begins; null is as before it."""

    from_samples: int = Field(ge=1)
    """The part begins after so many samples of the run, where a step begins."""

    blend: Blend | None = None
    """As ``data.blend``, from here on. A corpus goes on where it was in its own order."""

    seq_length: int | None = Field(default=None, ge=1)
    """As ``training.seq_length``, from here on. The samples are cut anew, so that every corpus
    begins a new pass over its documents."""

    micro_batch_size: int | None = Field(default=None, ge=1)
    """As ``training.micro_batch_size``, from here on: longer sequences take more memory."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.blend is None and self.seq_length is None and self.micro_batch_size is None:
            raise ValueError(
                "changes nothing; give blend, seq_length or micro_batch_size, or remove it"
            )
        return self


class DataSection(Section):
    """The section ``data``."""

    blend: Blend | None = None
    """Weight of each corpus, by name, in no unit: of the samples it gives its weight by the sum
    of all. Names are those of ``corpora`` and of ``imported``; one that is not here is not trained
    on. Null: every corpus of ``corpora`` by size (its weight is the number of its training
    samples), so that all are read equally often."""

    validation: tuple[str, ...] | None = None
    """Corpora whose loss is measured, each by itself: one of the blend on its validation
    documents, any other on all of its documents. Null: those of the blend."""

    imported: dict[str, str] = Field(default_factory=dict)
    """Tokens made elsewhere: by name, the path of a ``.bin`` and ``.idx`` without the ending. A
    manifest beside them says what they are; ``stages.describe_tokens`` writes it. DVC does not
    watch these files: when they change, ``dvc repro --force --single-item
    validate_config``."""

    eod_in_loss: bool = True
    """Whether a label that is the end-of-document token counts in the loss. True, so that the
    model learns where texts end."""

    positions: Literal["window", "document"] = "window"
    """Where positions are counted from: the start of the sample, or, ``document``, the start of
    each document in it. ``window`` as Megatron and GPT-3."""

    attention: Literal["window", "document"] = "window"
    """What a token sees: all before it in the sample, or, ``document``, only what belongs to its
    own document. ``window`` as Megatron and GPT-3."""

    phases: tuple[PhaseSection, ...] = ()
    """Later parts of the training, such as other weights near its end, or a longer seq_length.
    A run that has not come so far yet continues when one is added."""

    @field_validator("imported")
    @classmethod
    def _imported_names_are_simple(cls, imported: dict[str, str]) -> dict[str, str]:
        for name in imported:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"the name {name} must have small letters, digits and underscores, a letter "
                    "first; rename it, such as web_2024"
                )
        return imported


@dataclass(frozen=True)
class PlannedPhase:
    """A part of a training with its nulls filled in, before the corpora are read.

    Attributes:
        field: where params.yaml says it: ``training``, or ``data.phases[0]`` for the second one.
        from_samples: samples of the run before it; 0 for the first.
        seq_length: tokens per sample.
        micro_batch_size: samples that one process computes at once.
        blend: weights by corpus; None is every corpus of ``corpora`` by size.
    """

    field: str
    from_samples: int
    seq_length: int
    micro_batch_size: int
    blend: Mapping[str, float] | None


def planned_phases(training: TrainingShape, data: DataSection) -> tuple[PlannedPhase, ...]:
    """The parts of a training in the order in which they are written."""
    length, micro, blend = training.seq_length, training.micro_batch_size, data.blend
    planned = [PlannedPhase("training", 0, length, micro, blend)]
    for number, phase in enumerate(data.phases):
        length, micro = phase.seq_length or length, phase.micro_batch_size or micro
        blend = blend if phase.blend is None else phase.blend
        field = f"data.phases[{number}]"
        planned.append(PlannedPhase(field, phase.from_samples, length, micro, blend))
    return tuple(planned)


def blended_names(planned: Sequence[PlannedPhase], corpora: Sequence[str]) -> tuple[str, ...]:
    """The corpora of the blends of all parts, by name; ``corpora`` are those of params.yaml."""
    blends = [corpora if phase.blend is None else tuple(phase.blend) for phase in planned]
    return tuple(sorted({name for blend in blends for name in blend}))


def validation_names(data: DataSection, blended: Sequence[str]) -> tuple[str, ...]:
    """The corpora whose loss is measured."""
    return tuple(blended) if data.validation is None else data.validation
