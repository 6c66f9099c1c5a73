"""The corpora of a run as their manifests and indexes describe them, and the parts of a training.

Corpora stand in the order of their names, everywhere: their order in params.yaml, and that of
``outputs/run_config.json``, whose keys are sorted, decides nothing.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from lib.config.data_section import (
    DataSection,
    PlannedPhase,
    blended_names,
    planned_phases,
    validation_names,
)
from lib.config.schema import Section, TrainingShape

V = TypeVar("V")


def _by_name(mapping: dict[str, V]) -> dict[str, V]:
    return dict(sorted(mapping.items()))


ByName = Annotated[dict[str, V], AfterValidator(_by_name)]


class SplitRange(Section):
    """One split of a corpus: a contiguous range of documents."""

    documents: tuple[int, int]
    """First document and the one after the last."""

    tokens: int
    """Tokens of these documents, end-of-document tokens included."""

    samples: int
    """Samples of training.seq_length tokens in them: (tokens - 1) // seq_length, at least 0."""

    def samples_of(self, seq_length: int) -> int:
        """Samples of another length in it."""
        return max(0, (self.tokens - 1) // seq_length)


class CorpusFacts(Section):
    """One tokenised corpus."""

    manifest: str
    """Path of its manifest; its files lie beside it."""

    tokens_sha256: str
    """sha256 of its tokens: another corpus is another run."""

    dtype: Literal["uint8", "uint16", "int32", "int64"]
    """Number type of its .bin."""

    documents: int
    """Documents in all."""

    tokens: int
    """Tokens in all."""

    splits: dict[Literal["train", "valid", "test"], SplitRange]
    """Its three splits. Of a corpus that is not trained on, ``train`` is empty and each of the
    others is the whole."""


class TokensFacts(Section):
    """What was read of the tokens: the tokenizer that made them, and each corpus of the run."""

    tokenizer_fingerprint: str
    """sha256 of the tokenizer that made the tokens."""

    vocab_size: int = Field(ge=1)
    """Token ids are 0 to vocab_size - 1."""

    eod_id: int = Field(ge=0)
    """Id of the end-of-document token."""

    corpora: ByName[CorpusFacts]
    """The corpora that are trained on or measured."""


class Phase(Section):
    """A part of a training, up to where the next one begins."""

    from_samples: int
    """Samples of the run before it; 0 for the first."""

    seq_length: int
    """Tokens per sample."""

    micro_batch_size: int
    """Samples that one process computes at once."""

    weights: ByName[float]
    """The weight of each corpus of the run's blends; 0 where this part does not read it."""

    samples: ByName[int]
    """Training samples of seq_length tokens in each of these corpora."""

    def share(self, name: str) -> Fraction:
        """The part of the samples that a corpus gives, 0 to 1."""
        weights = {key: Fraction(str(weight)) for key, weight in self.weights.items()}
        return weights[name] / sum(weights.values())


class DataFacts(TokensFacts):
    """What is read, when and in which shares, and what is measured."""

    phases: tuple[Phase, ...]
    """The parts of the training in order; the first begins at 0."""

    validation: tuple[str, ...]
    """Corpora on whose split ``valid`` the loss is measured, in samples of training.seq_length."""

    eod_in_loss: bool = True
    """Whether a label that is the end-of-document token counts in the loss."""

    positions: Literal["window", "document"] = "window"
    """Where positions are counted from: the start of the sample or of each document in it."""

    attention: Literal["window", "document"] = "window"
    """What a token sees: all before it in the sample, or only its own document."""

    @property
    def trained(self) -> tuple[str, ...]:
        """The corpora of the blends, in the order of each phase's weights and samples."""
        return tuple(self.phases[0].weights)

    def phase_index_at(self, consumed_samples: int) -> int:
        """Number of the phase of the sample that follows ``consumed_samples``."""
        begun = [phase.from_samples <= consumed_samples for phase in self.phases]
        return sum(begun) - 1

    def tokens_before(self, consumed_samples: int) -> int:
        """Tokens of the first ``consumed_samples`` of the run."""
        return sum(
            count * phase.seq_length
            for phase, count in zip(
                self.phases, self._samples_by_phase(consumed_samples), strict=True
            )
        )

    def passes(self, consumed_samples: int) -> dict[str, float]:
        """How often each corpus's training documents were read by then."""
        counts = self._samples_by_phase(consumed_samples)
        passes = dict.fromkeys(self.trained, Fraction(0))
        for phase, count in zip(self.phases, counts, strict=True):
            for name, weight in phase.weights.items():
                if weight > 0:
                    passes[name] += count * phase.share(name) / phase.samples[name]
        return {name: float(number) for name, number in passes.items()}

    def _samples_by_phase(self, consumed_samples: int) -> list[int]:
        starts = [min(phase.from_samples, consumed_samples) for phase in self.phases]
        return [
            end - start for start, end in zip(starts, [*starts[1:], consumed_samples], strict=True)
        ]


def resolve_data(
    training: TrainingShape, data: DataSection, corpora: Sequence[str], tokens: TokensFacts
) -> DataFacts:
    """Joins the section and the corpora, which break no rule.

    Args:
        training: for the lengths of the first phase.
        data: the section.
        corpora: names of the section ``corpora``, all of which null blends take.
        tokens: facts of every corpus that is read, perhaps of more.
    """
    planned = planned_phases(training, data)
    blended = blended_names(planned, corpora)
    validation = validation_names(data, blended)
    known = {name: tokens.corpora[name] for name in (*blended, *validation)}
    return DataFacts(
        tokenizer_fingerprint=tokens.tokenizer_fingerprint,
        vocab_size=tokens.vocab_size,
        eod_id=tokens.eod_id,
        corpora=known,
        phases=tuple(_resolve_phase(phase, blended, corpora, known) for phase in planned),
        validation=validation,
        eod_in_loss=data.eod_in_loss,
        positions=data.positions,
        attention=data.attention,
    )


def _resolve_phase(
    planned: PlannedPhase,
    blended: Sequence[str],
    corpora: Sequence[str],
    known: Mapping[str, CorpusFacts],
) -> Phase:
    length = planned.seq_length
    samples = {name: known[name].splits["train"].samples_of(length) for name in blended}
    by_size = {name: float(samples[name]) for name in corpora if name in samples}
    blend = by_size if planned.blend is None else planned.blend
    return Phase(
        from_samples=planned.from_samples,
        seq_length=length,
        micro_batch_size=planned.micro_batch_size,
        weights={name: blend.get(name, 0.0) for name in blended},
        samples=samples,
    )
