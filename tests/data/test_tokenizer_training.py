"""Text of several corpora to train a tokenizer on: each by its share, in its own order."""

from collections.abc import Iterator
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lib.data.tokenizer_training import TrainingText, in_turn

# Lengths of the documents of one to four corpora.
LENGTHS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=30), min_size=1, max_size=4)


def texts_of(number: int, lengths: list[int]) -> list[str]:
    """Each tells its corpus and its place; two bytes a letter, for bytes are what counts."""
    return [chr(0xE0 + number) * length for length in lengths]


@given(LENGTHS)
def test_every_beginning_has_each_corpus_by_its_share(lengths: list[list[int]]) -> None:
    """Within one document: no corpus is drawn from while a smaller part of another was read."""
    totals = [2 * sum(each) for each in lengths]
    corpora = [texts_of(number, each) for number, each in enumerate(lengths)]
    taken = [0] * len(lengths)
    for text in in_turn([TrainingText(*each) for each in zip(corpora, totals, strict=True)]):
        number = ord(text[0]) - 0xE0
        parts = [Fraction(have, total) for have, total in zip(taken, totals, strict=True)]
        assert parts[number] == min(part for part in parts if part < 1)
        taken[number] += len(text.encode())
    assert taken == totals


@given(LENGTHS)
def test_every_document_comes_once_in_the_order_of_its_corpus(lengths: list[list[int]]) -> None:
    corpora = [texts_of(number, each) for number, each in enumerate(lengths)]
    mixed = list(
        in_turn([TrainingText(each, sum(len(t.encode()) for t in each)) for each in corpora])
    )
    for number, each in enumerate(corpora):
        assert [text for text in mixed if text[0] == chr(0xE0 + number)] == each
    assert len(mixed) == sum(map(len, corpora))


def test_no_more_is_read_than_asked_for() -> None:
    read: list[str] = []

    def endless(text: str) -> Iterator[str]:
        while True:
            read.append(text)
            yield text

    mixed = in_turn([TrainingText(endless("aa"), 3 * 10**12), TrainingText(endless("b"), 10**12)])
    assert "".join(next(mixed) for _ in range(400)).count("a") == 480  # three quarters of the text
    assert len(read) <= 402
