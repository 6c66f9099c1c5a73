"""Rules between params.yaml and the tokenised corpora; see ``lib.config.rules``.

``append_eod`` is that of the section ``tokens`` while nothing was tokenised yet.
``tokens_facts`` are those of all corpora that are read, ``origins`` what made each. A name that no
corpus has is the business of ``lib.config.blend_rules``.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib.config.data_facts import TokensFacts
from lib.config.data_section import (
    DataSection,
    PlannedPhase,
    blended_names,
    planned_phases,
    validation_names,
)
from lib.config.operation import EvaluateConfig
from lib.config.schema import Section, TrainingSection
from lib.errors import Problem, UserError

TOKENIZER_INFO = "data/tokenizer/tokenizer_info.json"

Split = Literal["train", "valid", "test"]

# The split on which a loss can be measured instead.
_OTHER: Mapping[Split, Split] = {"train": "train", "valid": "test", "test": "valid"}

_LARGEST_ID = {"uint8": 2**8 - 1, "uint16": 2**16 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}


class TokenizerFacts(Section):
    """What data/tokenizer/tokenizer_info.json says that the tokens must agree with."""

    fingerprint: str
    """sha256 of the tokenizer."""

    vocab_size: int
    """Token ids are 0 to vocab_size - 1."""

    eod_id: int
    """Id of the end-of-document token."""


def read_tokenizer_facts() -> TokenizerFacts:
    """What data/tokenizer says of itself.

    Read as plain JSON, not by ``lib.data.tokenizer``, whose import of ``tokenizers`` would take
    longer than all the rest.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        info = json.loads(Path(TOKENIZER_INFO).read_text(encoding="utf-8"))
        return TokenizerFacts(
            fingerprint=info["fingerprint"],
            vocab_size=info["vocab_size"],
            eod_id=info["end_of_document"]["id"],
        )
    except FileNotFoundError:
        raise UserError(
            f"{TOKENIZER_INFO}: not there; the prepare_tokenizer stage writes it"
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{TOKENIZER_INFO}: damaged ({reason}); write it again: dvc repro --force "
            "--single-item prepare_tokenizer"
        ) from None


@dataclass(frozen=True)
class TokensOrigin:
    """Where the tokens of a corpus come from.

    Attributes:
        manifest: path of the manifest that says so.
        tokenizer: what made them.
        append_eod: whether the end-of-document token follows each document.
        imported: the prefix of a pair made elsewhere; None for tokens of this workflow.
    """

    manifest: str
    tokenizer: TokenizerFacts
    append_eod: bool
    imported: str | None = None

    @property
    def remedy(self) -> str:
        """How to get other tokens."""
        if self.imported is None:
            return "tokenise again: dvc repro --force --single-item tokenize_corpus"
        return (
            "take their tokenizer (tokenizer.kind: tokenizer_json), or describe them anew: python "
            f"-m stages.describe_tokens {self.imported} --tokenizer data/tokenizer --append-eod "
            "(or --no-append-eod)"
        )


def tokens_are_of_this_tokenizer(
    origins: Mapping[str, TokensOrigin], tokenizer_facts: TokenizerFacts
) -> Iterator[Problem]:
    """Ids mean nothing without the tokenizer that gave them."""
    for origin in origins.values():
        theirs, ours = origin.tokenizer, tokenizer_facts
        pairs = (
            ("tokenizer_fingerprint", theirs.fingerprint, ours.fingerprint),
            ("vocab_size", theirs.vocab_size, ours.vocab_size),
            ("eod_id", theirs.eod_id, ours.eod_id),
        )
        for name, of_tokens, of_tokenizer in pairs:
            if of_tokens != of_tokenizer:
                rule = f"differs from {TOKENIZER_INFO}: {of_tokenizer}"
                yield Problem(name, str(of_tokens), rule, origin.remedy, origin.manifest)


def vocabulary_fits_the_file(
    tokens_facts: TokensFacts, origins: Mapping[str, TokensOrigin]
) -> Iterator[Problem]:
    """An id that the number type cannot hold was stored as another one."""
    for name, origin in origins.items():
        size, eod = origin.tokenizer.vocab_size, origin.tokenizer.eod_id
        dtype = tokens_facts.corpora[name].dtype
        largest = _LARGEST_ID[dtype]
        if size - 1 > largest:
            rule = f"ids to {size - 1} do not fit {dtype}, which ends at {largest}"
            yield Problem("vocab_size", str(size), rule, origin.remedy, origin.manifest)
        if eod >= size:
            rule = f"must be less than vocab_size = {size}"
            yield Problem("eod_id", str(eod), rule, origin.remedy, origin.manifest)


def ends_of_documents_will_be_there(
    data: DataSection, training: TrainingSection, corpora: Sequence[str], append_eod: bool
) -> Iterator[Problem]:
    """As below, of the corpora that are still to be tokenised."""
    blended = blended_names(planned_phases(training, data), corpora)
    of_workflow = [name for name in blended if name in corpora]
    if not data.eod_in_loss and not append_eod and of_workflow:
        yield _no_ends(of_workflow)


def ends_of_documents_are_there(
    data: DataSection,
    training: TrainingSection,
    corpora: Sequence[str],
    origins: Mapping[str, TokensOrigin],
) -> Iterator[Problem]:
    """To leave a label out of the loss that no text has would do nothing."""
    blended = blended_names(planned_phases(training, data), corpora)
    without = [name for name in blended if name in origins and not origins[name].append_eod]
    if not data.eod_in_loss and without:
        yield _no_ends(without)


def _no_ends(names: Sequence[str]) -> Problem:
    return Problem(
        "data.eod_in_loss",
        "false",
        f"the documents of {', '.join(names)} do not end with the end-of-document token",
        "write true, or tokens.append_eod: true",
    )


def splits_that_are_read_have_a_share(
    data: DataSection, training: TrainingSection, evaluate: EvaluateConfig, corpora: Sequence[str]
) -> Iterator[Problem]:
    """Told before a corpus is tokenised; whether a share holds a sample is seen after that."""
    blended = blended_names(planned_phases(training, data), corpora)
    if not set(blended) & set(validation_names(data, blended)):
        return  # what is measured was not cut
    for split, reader in _measurements(training, evaluate):
        if _share(training, split) == 0:
            yield Problem(
                "training.split",
                f'"{training.split}"',
                f"gives the {split} split no documents, which {reader} reads",
                _more_tokens(
                    split,
                    0,
                    _unread(split, training, evaluate, _share(training, _OTHER[split]) > 0),
                ),
            )


def _share(training: TrainingSection, split: Split) -> float:
    shares = [*map(float, training.split.split(",")), 0.0, 0.0]
    return shares[("train", "valid", "test").index(split)]


def splits_hold_a_sample(
    data: DataSection,
    training: TrainingSection,
    evaluate: EvaluateConfig,
    corpora: Sequence[str],
    tokens_facts: TokensFacts,
) -> Iterator[Problem]:
    """A sample is seq_length tokens and the one that follows."""
    planned = planned_phases(training, data)
    blended = blended_names(planned, corpora)
    needs = _training_needs(planned, corpora)
    for split, reader in _measurements(training, evaluate):
        for name in validation_names(data, blended):
            needs[name, split, training.seq_length].append(reader)
    for (name, split, length), readers in needs.items():
        facts = tokens_facts.corpora.get(name)
        if facts is None or facts.splits[split].tokens >= length + 1:
            continue
        first, end = facts.splits[split].documents
        tokens = facts.splits[split].tokens
        is_cut = name in blended
        if is_cut and _share(training, split) == 0:
            continue  # told by the rule above
        other_holds = facts.splits[_OTHER[split]].tokens >= length + 1
        yield Problem(
            "training.split" if is_cut else "data.validation",
            f'"{training.split}"' if is_cut else name,
            f"the {split} split of {name} (read by {' and '.join(readers)}) has {end - first} of "
            f"{facts.documents} documents with {tokens} tokens, fewer than one sample of "
            f"seq_length + 1 = {length + 1}",
            _more_tokens(split, tokens, _unread(split, training, evaluate, other_holds)),
        )


Needs = defaultdict[tuple[str, Split, int], list[str]]


def _training_needs(planned: Sequence[PlannedPhase], corpora: Sequence[str]) -> Needs:
    """Who reads the training split of which corpus in samples of which length."""
    needs: Needs = defaultdict(list)
    for phase in planned:
        blend = dict.fromkeys(corpora, 1.0) if phase.blend is None else phase.blend
        for name, weight in blend.items():
            if weight > 0:
                needs[name, "train", phase.seq_length].append(phase.field)
    return needs


def _measurements(
    training: TrainingSection, evaluate: EvaluateConfig
) -> Iterator[tuple[Literal["valid", "test"], str]]:
    """The splits on which a loss is measured, and by whom."""
    if training.eval_interval > 0:
        yield "valid", f"training.eval_interval = {training.eval_interval}"
    yield evaluate.split, f"evaluate.split = {evaluate.split}"


def _unread(
    split: Split, training: TrainingSection, evaluate: EvaluateConfig, other_holds: bool
) -> str | None:
    """What to write so that nobody measures this split, if the other one can take its place."""
    keys = []
    if split == "valid" and training.eval_interval > 0:
        keys.append("eval_interval: 0")
    if split == evaluate.split:
        if not other_holds:
            return None
        keys.append(f"evaluate.split: {_OTHER[split]}")
    return " and ".join(keys) or None


def _more_tokens(split: Split, tokens: int, unread: str | None) -> str:
    remedies = ["give it a larger share", "take a larger corpus"]
    if tokens > 1:
        remedies.append(f"write a seq_length of at most {tokens - 1}")
    if split == "train":
        remedies.append("leave it out of data.blend")
    else:
        remedies.append("name others in data.validation")
    if unread is not None:
        remedies.append(f"write {unread}")
    return ", or ".join(remedies)


DATA_RULES = (
    splits_that_are_read_have_a_share,
    ends_of_documents_will_be_there,
    tokens_are_of_this_tokenizer,
    vocabulary_fits_the_file,
    ends_of_documents_are_there,
    splits_hold_a_sample,
)
