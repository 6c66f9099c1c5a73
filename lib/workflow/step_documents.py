"""The documents behind a training step: in all, or those that one process read.

A step is arithmetic: the batch schedule says how many samples came before it, the order which
sample of which corpus each of its positions is, and the index which documents lie in the sample.
Nothing of a run is needed but its configuration, and no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from lib.checkpoint.run_data import open_samples, require_tokens
from lib.config.batch_schedule import BatchSchedule
from lib.config.run_config import RunConfig
from lib.data.order import SampleOrder, step_positions
from lib.data.provenance import DocumentOrigins, Origin, Piece, pieces_of
from lib.data.samples import SampleWindows
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokenizer import TextTokenizer, load_tokenizer
from lib.errors import UserError

_LAYOUT_KEYS = ("tensor", "pipeline", "data", "micro_batch_size")


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        number: from 1, as in the log.
        consumed_samples: samples of the run before it.
        samples: of the step, over all ranks.
        phase: number of the part of the training, from 0.
        seq_length: tokens per sample.
    """

    number: int
    consumed_samples: int
    samples: int
    phase: int
    seq_length: int

    @classmethod
    def of(cls, config: RunConfig, number: int) -> Self:
        """The step of that number.

        Raises:
            UserError: the run has no such step.
        """
        last = config.training.train_iters
        if not 1 <= number <= last:
            raise UserError(f"step {number}: the run has the steps 1 to {last}; give one of them")
        schedule = BatchSchedule.of(config.training)
        consumed, steps = 0, number - 1
        while steps and consumed < schedule.samples:
            consumed += schedule.at(consumed)
            steps -= 1
        consumed += steps * schedule.global_batch_size
        phase = config.data.phase_index_at(consumed)
        seq_length = config.data.phases[phase].seq_length
        return cls(number, consumed, schedule.at(consumed), phase, seq_length)

    def positions(self) -> npt.NDArray[np.int64]:
        """Positions of all its samples in the order of the run, int64 [samples]."""
        return np.arange(self.consumed_samples, self.consumed_samples + self.samples)


@dataclass(frozen=True)
class RankLayout:
    """What decides which samples a process reads; names as in the section ``parallel``.

    Attributes:
        tensor: processes that share each layer; they read the same samples.
        pipeline: stages, which read the same samples.
        data: copies of the model, each of which reads its own.
        micro_batch_size: samples that a process computes at once.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batch_size: int

    @classmethod
    def of(cls, config: RunConfig, step: Step, changes: str | None) -> Self:
        """The layout of a run at a step.

        Args:
            config: the run configuration.
            step: the step, whose batch the layout must divide.
            changes: what was otherwise when the step was trained, such as
                ``data=4,micro_batch_size=2``; the layout may change within a run.

        Raises:
            UserError: ``changes`` cannot be read, the number of copies is not known, or the batch
                does not divide.
        """
        parallel = config.parallel
        known = {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "data": parallel.data,
            "micro_batch_size": config.data.phases[step.phase].micro_batch_size,
        } | _read_changes(changes)
        if known["data"] is None:
            raise UserError(
                "--layout is missing: parallel.data is null in the run configuration, so it does "
                "not say how many copies of the model there were; give --layout data=4, for example"
            )
        layout = cls(**{name: value for name, value in known.items() if value is not None})
        if step.samples % (layout.data * layout.micro_batch_size):
            raise UserError(
                f"step {step.number}: its {step.samples} samples do not divide over data = "
                f"{layout.data} copies in micro batches of {layout.micro_batch_size}; give the "
                "layout that the step was trained in by --layout data=...,micro_batch_size=..."
            )
        return layout

    def copy_of(self, rank: int) -> int:
        """The copy of the model that a process belongs to: its data-parallel rank.

        Ranks are laid out as in ``lib.parallel.mesh``, tensor fastest, then data, then pipeline.

        Raises:
            UserError: there is no such process.
        """
        processes = self.tensor * self.pipeline * self.data
        if not 0 <= rank < processes:
            raise UserError(
                f"--rank {rank}: the layout has the processes 0 to {processes - 1} (tensor "
                f"{self.tensor}, pipeline {self.pipeline}, data {self.data}); give one of them, or "
                "another --layout"
            )
        return rank // self.tensor % self.data

    def positions(self, step: Step, rank: int) -> npt.NDArray[np.int64]:
        """Positions that a process reads in a step, int64 [micro batches, micro_batch_size]."""
        return step_positions(
            step.consumed_samples,
            micro_batches=step.samples // (self.data * self.micro_batch_size),
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.copy_of(rank),
            dp_size=self.data,
        )


def _read_changes(text: str | None) -> dict[str, int]:
    """``data=4,micro_batch_size=2`` as a mapping."""
    changes: dict[str, int] = {}
    for item in text.split(",") if text else []:
        name, _, value = item.partition("=")
        if name.strip() not in _LAYOUT_KEYS or not value.strip().isdecimal() or not int(value):
            raise UserError(
                f"--layout {text}: {item!r} is none of {', '.join(_LAYOUT_KEYS)} with a number of "
                "1 or more; write data=4,micro_batch_size=2, for example"
            )
        changes[name.strip()] = int(value)
    return changes


@dataclass(frozen=True)
class FoundPiece:
    """A piece of a sample, and the document that it is of."""

    piece: Piece
    origin: Origin


@dataclass(frozen=True)
class FoundSample:
    """One sample of a run.

    Attributes:
        position: in the order of the run; -1 for a sample that was asked for by its number.
        corpus: name of its corpus.
        sample: its number in the split.
        start: position of its first token in the corpus.
        pieces: the documents in its seq_length + 1 tokens, in order.
    """

    position: int
    corpus: str
    sample: int
    start: int
    pieces: tuple[FoundPiece, ...]


class RunDocuments:
    """Finds the documents behind the samples of a run.

    Attributes:
        config: the run configuration.
    """

    def __init__(self, config: RunConfig, raw_root: Path, tokenizer: Path) -> None:
        """Makes sure that the tokens are those of the run.

        Args:
            config: the run configuration.
            raw_root: where the raw corpora are, by name.
            tokenizer: folder of the tokenizer; read only where texts must be decoded.

        Raises:
            UserError: tokens are missing, or are not those of the run.
        """
        require_tokens(config.data, config.data.corpora)
        self.config = config
        self._order = SampleOrder.of_phases(config.data.phases, config.training.seed)
        self._raw_root = raw_root
        self._tokenizer_folder = tokenizer
        self._origins: dict[str, DocumentOrigins] = {}
        self._corpora: dict[str, TokenizedCorpus] = {}
        self._windows: dict[tuple[str, int], SampleWindows] = {}

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the run.

        Raises:
            UserError: the one in the folder is another.
        """
        tokenizer = load_tokenizer(self._tokenizer_folder)
        if tokenizer.fingerprint != self.config.data.tokenizer_fingerprint:
            raise UserError(
                f"{self._tokenizer_folder}: is not the tokenizer that made the tokens of the run; "
                "run: dvc repro validate_config"
            )
        return tokenizer

    def behind(self, step: Step, positions: Sequence[int]) -> Iterator[FoundSample]:
        """The samples at some positions of a step, in that order, one by one: texts are long."""
        drawn = self._order.samples_at(np.array(positions, dtype=np.int64))
        for position, corpus, sample in zip(
            positions, drawn.corpus.tolist(), drawn.sample.tolist(), strict=True
        ):
            name = self._order.names[corpus]
            key = (name, step.seq_length)
            if key not in self._windows:
                self._windows[key] = open_samples(self.config, name, "train", step.seq_length)
            yield self.find(position, name, sample, self._windows[key])

    def find(self, position: int, name: str, sample: int, windows: SampleWindows) -> FoundSample:
        """The documents of a sample.

        Args:
            position: in the order of the run, or -1.
            name: of the corpus.
            sample: number of the sample.
            windows: the samples of the corpus that this one is of.
        """
        origins, start = self.origins_of(name), windows.position(sample)
        pieces = pieces_of(self._corpora[name], start, start + windows.seq_length + 1)
        found = tuple(FoundPiece(piece, origins.find(piece.document)) for piece in pieces)
        return FoundSample(position, name, sample, start, found)

    def origins_of(self, name: str) -> DocumentOrigins:
        """Texts and sources of the documents of a corpus."""
        if name not in self._origins:
            manifest = Path(self.config.data.corpora[name].manifest)
            corpus = TokenizedCorpus.open(manifest)
            self._corpora[name] = corpus
            self._origins[name] = DocumentOrigins(
                corpus, manifest, self._raw_root / name, lambda ids: self.tokenizer.decode(ids)
            )
        return self._origins[name]
