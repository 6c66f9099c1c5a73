"""Rules between params.yaml and the tokenised corpus; see ``lib.config.rules``."""

from collections.abc import Iterator

from lib.config.operation import EvaluateConfig
from lib.config.run_config import DataFacts
from lib.config.schema import Section, TrainingSection
from lib.errors import Problem

TOKENS_MANIFEST = "data/tokens/manifest.json"
TOKENIZER_INFO = "data/tokenizer/tokenizer_info.json"

_LARGEST_ID = {"uint8": 2**8 - 1, "uint16": 2**16 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}


class TokenizerFacts(Section):
    """What data/tokenizer/tokenizer_info.json says that the tokens must agree with."""

    fingerprint: str
    """sha256 of the tokenizer."""

    vocab_size: int
    """Token ids are 0 to vocab_size - 1."""

    eod_id: int
    """Id of the end-of-document token."""


def tokens_are_of_this_tokenizer(
    data: DataFacts, tokenizer_facts: TokenizerFacts
) -> Iterator[Problem]:
    """Ids mean nothing without the tokenizer that gave them."""
    pairs = (
        ("tokenizer_fingerprint", data.tokenizer_fingerprint, tokenizer_facts.fingerprint),
        ("vocab_size", data.vocab_size, tokenizer_facts.vocab_size),
        ("eod_id", data.eod_id, tokenizer_facts.eod_id),
    )
    for name, of_tokens, of_tokenizer in pairs:
        if of_tokens != of_tokenizer:
            yield Problem(
                name,
                str(of_tokens),
                f"differs from {TOKENIZER_INFO}: {of_tokenizer}",
                "tokenise again: dvc repro tokenize_corpus",
                TOKENS_MANIFEST,
            )


def vocabulary_fits_the_file(data: DataFacts) -> Iterator[Problem]:
    """An id that the number type cannot hold was stored as another one."""
    largest = _LARGEST_ID[data.dtype]
    if data.vocab_size - 1 > largest:
        yield Problem(
            "vocab_size",
            str(data.vocab_size),
            f"ids to {data.vocab_size - 1} do not fit {data.dtype}, which ends at {largest}",
            "tokenise again: dvc repro --force tokenize_corpus",
            TOKENS_MANIFEST,
        )
    if data.eod_id >= data.vocab_size:
        yield Problem(
            "eod_id",
            str(data.eod_id),
            f"must be less than vocab_size = {data.vocab_size}",
            "tokenise again: dvc repro --force tokenize_corpus",
            TOKENS_MANIFEST,
        )


def splits_hold_a_sample(
    training: TrainingSection, evaluate: EvaluateConfig, data: DataFacts
) -> Iterator[Problem]:
    """A sample is seq_length tokens and the one that follows."""
    readers: dict[str, list[str]] = {"train": ["training"], "valid": [], "test": []}
    if training.eval_interval > 0:
        readers["valid"].append(f"training.eval_interval = {training.eval_interval}")
    readers[evaluate.split].append(f"evaluate.split = {evaluate.split}")
    for name, split in data.splits.items():
        if not readers[name] or split.tokens >= training.seq_length + 1:
            continue
        first, end = split.documents
        yield Problem(
            "training.split",
            f'"{training.split}"',
            f"the {name} split (read by {' and '.join(readers[name])}) has {end - first} of "
            f"{data.documents} documents with {split.tokens} tokens, fewer than one sample of "
            f"seq_length + 1 = {training.seq_length + 1}",
            _more_tokens(name, split.tokens),
        )


def _more_tokens(name: str, tokens: int) -> str:
    remedies = ["give it a larger share", "take a larger corpus"]
    if tokens > 1:
        remedies.append(f"write a seq_length of at most {tokens - 1}")
    if name == "valid":
        remedies.append("write eval_interval: 0 and evaluate.split: test")
    if name == "test":
        remedies.append("write evaluate.split: valid")
    return ", or ".join(remedies)


DATA_RULES = (tokens_are_of_this_tokenizer, vocabulary_fits_the_file, splits_hold_a_sample)
