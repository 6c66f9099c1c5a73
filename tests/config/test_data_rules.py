"""Rules between the parameters and the tokenised corpora."""

import re
from typing import Any

import pytest

from lib.config.data_rules import (
    TokenizerFacts,
    TokensOrigin,
    ends_of_documents_are_there,
    splits_hold_a_sample,
    tokens_are_of_this_tokenizer,
    vocabulary_fits_the_file,
)
from tests.config.conftest import Factory
from tests.config.sections import data, evaluate, only, training

TOKENIZER = TokenizerFacts(fingerprint="ff", vocab_size=300, eod_id=0)
OURS = TokensOrigin("data/tokens/stdlib/manifest.json", TOKENIZER, append_eod=True)
THEIRS = TokensOrigin("pairs/web.manifest.json", TOKENIZER, append_eod=True, imported="pairs/web")


def test_tokens_are_of_this_tokenizer() -> None:
    rule, origins = tokens_are_of_this_tokenizer, {"stdlib": OURS, "web": THEIRS}
    assert not list(rule(origins, TOKENIZER))
    found = list(rule(origins, TokenizerFacts(fingerprint="ee", vocab_size=301, eod_id=1)))
    fields = ["tokenizer_fingerprint", "vocab_size", "eod_id"]
    assert [problem.field for problem in found] == fields * 2
    assert str(found[0]) == (
        "data/tokens/stdlib/manifest.json: tokenizer_fingerprint = ff: differs from "
        "data/tokenizer/tokenizer_info.json: ee; tokenise again: dvc repro --force "
        "--single-item tokenize_corpus"
    )
    assert "python -m stages.describe_tokens pairs/web" in str(found[3])


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
    facts = make.facts(corpora={"web": make.corpus("web", 99, 9, 9, dtype=dtype)})
    tokenizer = TokenizerFacts(fingerprint="ff", vocab_size=vocab_size, eod_id=0)
    origins = {"web": TokensOrigin("m", tokenizer, append_eod=True)}
    assert (not list(vocabulary_fits_the_file(facts, origins))) == is_sound


@pytest.mark.parametrize(("eod_id", "fields"), [(299, []), (300, ["eod_id"])])
def test_end_of_document_is_in_the_vocabulary(
    make: Factory, eod_id: int, fields: list[str]
) -> None:
    tokenizer = TokenizerFacts(fingerprint="ff", vocab_size=300, eod_id=eod_id)
    origins = {"stdlib": TokensOrigin("m", tokenizer, append_eod=True)}
    found = vocabulary_fits_the_file(make.facts(), origins)
    assert [problem.field for problem in found] == fields


def test_a_label_that_no_document_has_is_not_left_out_of_the_loss() -> None:
    without = TokensOrigin("m", TOKENIZER, append_eod=False)
    origins, corpora = {"stdlib": OURS, "web": without}, ("stdlib", "web")
    found = only(ends_of_documents_are_there(data(eod_in_loss=False), training(), corpora, origins))
    assert found.startswith("data.eod_in_loss = false: the documents of web do not end with")
    for keys in ({}, {"eod_in_loss": False, "blend": {"stdlib": 1}, "validation": ["web"]}):
        assert not list(ends_of_documents_are_there(data(**keys), training(), corpora, origins))


def problems(
    make: Factory,
    tokens: dict[str, int],
    eval_interval: int = 1,
    evaluated: str = "test",
    **keys: Any,
) -> list[str]:
    """Of ``stdlib``, with so many tokens in each split or 100, beside the large ``web``."""
    counts = [tokens.get(name, 100) for name in ("train", "valid", "test")]
    corpora = {"stdlib": make.corpus("stdlib", *counts), "web": make.corpus("web", 9999, 999, 999)}
    found = splits_hold_a_sample(
        data(**keys),
        training(eval_interval=eval_interval),
        evaluate(split=evaluated),
        tuple(corpora),
        make.facts(corpora=corpora),
    )
    return [str(problem) for problem in found]


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_a_split_below_one_sample_is_refused_with_its_numbers(make: Factory, tokens: int) -> None:
    for name, documents in (("train", 90), ("valid", 5), ("test", 5)):
        found = problems(make, {name: tokens})
        assert len(found) == 1
        assert f"the {name} split of stdlib" in found[0]
        assert f"has {documents} of 100 documents with {tokens} tokens" in found[0]
        assert "seq_length + 1 = 17" in found[0]


def test_one_sample_is_enough(make: Factory) -> None:
    assert not problems(make, {"train": 17, "valid": 17, "test": 17})


def test_a_split_that_nobody_reads_may_be_empty(make: Factory) -> None:
    assert not problems(make, {"valid": 0}, eval_interval=0)
    assert problems(make, {"valid": 0}, eval_interval=0, evaluated="valid")
    assert not problems(make, {"test": 0}, evaluated="valid")
    assert problems(make, {"train": 0}, eval_interval=0)


def test_a_corpus_that_nobody_reads_may_be_small(make: Factory) -> None:
    small = {"train": 9, "valid": 9, "test": 9}
    assert len(problems(make, small)) == 3
    assert not problems(make, small, blend={"web": 1})
    assert not problems(make, small, blend={"web": 1, "stdlib": 0}, validation=["web"])
    later = [{"from_samples": 8, "blend": {"stdlib": 1}}]
    found = problems(make, small, blend={"web": 1}, validation=["web"], phases=later)
    assert len(found) == 1
    assert "the train split of stdlib (read by data.phases[0])" in found[0]
    found = problems(make, small, blend={"web": 1}, validation=["stdlib"])
    assert [line.partition(":")[0] for line in found] == ["data.validation = stdlib"] * 2


def test_a_longer_sample_must_fit_as_well(make: Factory) -> None:
    phases = [{"from_samples": 8, "seq_length": 100}]
    found = problems(make, {}, phases=phases)
    assert len(found) == 1
    assert "fewer than one sample of seq_length + 1 = 101" in found[0]
    assert not problems(make, {"train": 101}, phases=phases)


def test_the_remedy_fits_the_split(make: Factory) -> None:
    assert "write evaluate.split: valid" in problems(make, {"test": 9})[0]
    assert "write eval_interval: 0" in problems(make, {"valid": 9})[0]
    assert "evaluate.split" not in remedy(problems(make, {"valid": 9})[0])
    assert (
        "write eval_interval: 0 and evaluate.split: test"
        in (problems(make, {"valid": 9}, evaluated="valid")[0])
    )
    assert "a seq_length of at most 8" in problems(make, {"train": 9})[0]
    assert "seq_length of at most" not in problems(make, {"train": 1})[0]


def remedy(line: str) -> str:
    return line.rpartition("; ")[2]


@pytest.mark.parametrize("valid", [9, 17])
@pytest.mark.parametrize("test", [9, 17])
@pytest.mark.parametrize("eval_interval", [0, 10])
@pytest.mark.parametrize("evaluated", ["valid", "test"])
def test_measuring_another_split_is_advised_only_where_that_mends_it(
    make: Factory, valid: int, test: int, eval_interval: int, evaluated: str
) -> None:
    """Followed to the letter, the advice mends its problem and makes no other."""
    tokens = {"valid": valid, "test": test}
    now = problems(make, tokens, eval_interval, evaluated)
    for line in now:
        written = dict(re.findall(r"(eval_interval|evaluate.split): (\w+)", remedy(line)))
        if not written:
            continue
        left = problems(
            make,
            tokens,
            int(written.get("eval_interval", eval_interval)),
            written.get("evaluate.split", evaluated),
        )
        assert len(left) < len(now), (line, left)
