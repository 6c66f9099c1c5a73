"""Rules between the parameters and the tokenised corpus."""

import pytest

from lib.config.data_rules import (
    TokenizerFacts,
    splits_hold_a_sample,
    tokens_are_of_this_tokenizer,
    vocabulary_fits_the_file,
)
from lib.config.operation import EvaluateConfig
from lib.config.run_config import SplitRange
from lib.config.schema import TrainingSection
from tests.config.conftest import Factory

TOKENIZER = TokenizerFacts(fingerprint="ff", vocab_size=300, eod_id=0)


def test_tokens_are_of_this_tokenizer(make: Factory) -> None:
    assert not list(tokens_are_of_this_tokenizer(make.facts(), TOKENIZER))
    other = TokenizerFacts(fingerprint="ee", vocab_size=301, eod_id=1)
    found = list(tokens_are_of_this_tokenizer(make.facts(), other))
    assert [problem.field for problem in found] == ["tokenizer_fingerprint", "vocab_size", "eod_id"]
    assert str(found[0]) == (
        "data/tokens/manifest.json: tokenizer_fingerprint = ff: differs from "
        "data/tokenizer/tokenizer_info.json: ee; tokenise again: dvc repro tokenize_corpus"
    )


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "is_sound"),
    [
        ("uint16", 65536, True),
        ("uint16", 65537, False),
        ("uint8", 256, True),
        ("uint8", 257, False),
        ("int32", 2**31, True),
        ("int32", 2**31 + 1, False),
    ],
)
def test_vocabulary_fits_the_file(
    make: Factory, dtype: str, vocab_size: int, is_sound: bool
) -> None:
    facts = make.facts(dtype=dtype, vocab_size=vocab_size)
    assert (not list(vocabulary_fits_the_file(facts))) == is_sound


def test_end_of_document_is_in_the_vocabulary(make: Factory) -> None:
    assert not list(vocabulary_fits_the_file(make.facts(eod_id=299)))
    found = list(vocabulary_fits_the_file(make.facts(eod_id=300)))
    assert [problem.field for problem in found] == ["eod_id"]


def problems(
    make: Factory, tokens: dict[str, int], eval_interval: int = 1, evaluated: str = "test"
) -> list[str]:
    splits = {
        name: SplitRange(documents=(0, 2), tokens=tokens.get(name, 100), samples=0)
        for name in ("train", "valid", "test")
    }
    training = TrainingSection(
        seq_length=16, micro_batch_size=1, global_batch_size=1, eval_interval=eval_interval
    )
    evaluate = EvaluateConfig.model_validate({"split": evaluated})
    found = splits_hold_a_sample(training, evaluate, make.facts(splits=splits))
    return [str(problem) for problem in found]


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_a_split_below_one_sample_is_refused_with_its_numbers(make: Factory, tokens: int) -> None:
    for name in ("train", "valid", "test"):
        found = problems(make, {name: tokens})
        assert len(found) == 1
        assert f"the {name} split" in found[0]
        assert f"has 2 of 100 documents with {tokens} tokens" in found[0]
        assert "seq_length + 1 = 17" in found[0]


def test_one_sample_is_enough(make: Factory) -> None:
    assert not problems(make, {"train": 17, "valid": 17, "test": 17})


def test_a_split_that_nobody_reads_may_be_empty(make: Factory) -> None:
    assert not problems(make, {"valid": 0}, eval_interval=0)
    assert problems(make, {"valid": 0}, eval_interval=0, evaluated="valid")
    assert not problems(make, {"test": 0}, evaluated="valid")
    assert problems(make, {"train": 0}, eval_interval=0)


def test_the_remedy_fits_the_split(make: Factory) -> None:
    assert "write evaluate.split: valid" in problems(make, {"test": 9})[0]
    assert "write eval_interval: 0" in problems(make, {"valid": 9})[0]
    assert "a seq_length of at most 8" in problems(make, {"train": 9})[0]
    assert "seq_length of at most" not in problems(make, {"train": 1})[0]
