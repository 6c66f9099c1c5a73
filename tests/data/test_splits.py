"""Splits are Megatron's: contiguous ranges of documents at rounded cumulative shares."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.data.splits import SPLITS, describe_splits, parse_split, split_documents, whole_split
from lib.errors import UserError
from tests.data.tiny_corpus import open_corpus

# (split, documents, train, valid, test) from megatron-core 0.16.1: parse_and_normalize_split and
# convert_split_vector_to_split_matrix, then int(round(share * float(n))) as its builder does.
MEGATRON = [
    ("0,1,1", 2, (0, 0), (0, 1), (1, 2)),
    ("0,1,1", 1000, (0, 0), (0, 500), (500, 1000)),
    ("0,1,1", 123457, (0, 0), (0, 61728), (61728, 123457)),
    ("0,1,1", 987654321, (0, 0), (0, 493827160), (493827160, 987654321)),
    ("0.5,0.3,0.2", 0, (0, 0), (0, 0), (0, 0)),
    ("0.5,0.3,0.2", 2, (0, 1), (1, 2), (2, 2)),
    ("1,1,1", 0, (0, 0), (0, 0), (0, 0)),
    ("1,1,1", 3, (0, 1), (1, 2), (2, 3)),
    ("1,1,1", 1000, (0, 333), (333, 667), (667, 1000)),
    ("100", 0, (0, 0), (0, 0), (0, 0)),
    ("100", 1, (0, 1), (1, 1), (1, 1)),
    ("100", 3, (0, 3), (3, 3), (3, 3)),
    ("100", 5, (0, 5), (5, 5), (5, 5)),
    ("100", 10, (0, 10), (10, 10), (10, 10)),
    ("100", 1000, (0, 1000), (1000, 1000), (1000, 1000)),
    ("100", 987654321, (0, 987654321), (987654321, 987654321), (987654321, 987654321)),
    ("8,1,1", 0, (0, 0), (0, 0), (0, 0)),
    ("8,1,1", 1, (0, 1), (1, 1), (1, 1)),
    ("8,1,1", 3, (0, 2), (2, 3), (3, 3)),
    ("8,1,1", 5, (0, 4), (4, 4), (4, 5)),
    ("8,1,1", 1000, (0, 800), (800, 900), (900, 1000)),
    ("8,1,1", 123457, (0, 98766), (98766, 111111), (111111, 123457)),
    ("8,1,1", 987654321, (0, 790123457), (790123457, 888888889), (888888889, 987654321)),
    ("90,5,5", 0, (0, 0), (0, 0), (0, 0)),
    ("90,5,5", 37, (0, 33), (33, 35), (35, 37)),
    ("90,5,5", 1000, (0, 900), (900, 950), (950, 1000)),
    ("90,5,5", 987654321, (0, 888888889), (888888889, 938271605), (938271605, 987654321)),
    ("949,50,1", 0, (0, 0), (0, 0), (0, 0)),
    ("949,50,1", 2, (0, 2), (2, 2), (2, 2)),
    ("949,50,1", 5, (0, 5), (5, 5), (5, 5)),
    ("949,50,1", 10, (0, 9), (9, 10), (10, 10)),
    ("949,50,1", 1000, (0, 949), (949, 999), (999, 1000)),
    ("949,50,1", 123457, (0, 117161), (117161, 123334), (123334, 123457)),
    ("949,50,1", 987654321, (0, 937283951), (937283951, 986666667), (986666667, 987654321)),
    ("969,30,1", 1, (0, 1), (1, 1), (1, 1)),
    ("969,30,1", 2, (0, 2), (2, 2), (2, 2)),
    ("969,30,1", 5, (0, 5), (5, 5), (5, 5)),
    ("969,30,1", 123457, (0, 119630), (119630, 123334), (123334, 123457)),
    ("98,2,0", 5, (0, 5), (5, 5), (5, 5)),
    ("98,2,0", 987654321, (0, 967901235), (967901235, 987654321), (987654321, 987654321)),
]

weights = st.lists(
    st.one_of(st.integers(0, 1000), st.floats(0, 100).map(lambda x: round(x, 3))),
    min_size=1,
    max_size=3,
).filter(lambda parts: sum(parts) > 0)


@pytest.mark.parametrize(("split", "documents", "train", "valid", "test"), MEGATRON)
def test_ranges_are_megatrons(split, documents, train, valid, test):
    ranges = split_documents(parse_split(split), documents)
    assert ranges == {"train": train, "valid": valid, "test": test}


@given(parts=weights, documents=st.integers(0, 10**9))
def test_ranges_follow_the_rounded_cumulative_shares(parts, documents):
    ranges = split_documents(parse_split(",".join(map(str, parts))), documents)
    exact = [Fraction(str(part)) for part in parts] + [Fraction(0)] * (3 - len(parts))
    for number, name in enumerate(SPLITS):
        for place, edge in zip((number, number + 1), ranges[name], strict=True):
            share = sum(exact[:place], Fraction(0)) / sum(exact) * documents
            # The nearest whole number of documents; a tie may go either way in floating point.
            assert abs(edge - share) <= Fraction(1, 2) + Fraction(documents, 10**14)


@given(parts=weights, documents=st.integers(0, 10**12))
def test_splits_are_contiguous_disjoint_and_cover_everything(parts, documents):
    ranges = split_documents(parse_split(",".join(map(str, parts))), documents)
    assert tuple(ranges) == SPLITS
    edge = 0
    for first, last in ranges.values():
        assert first == edge
        assert last >= first
        edge = last
    assert edge == documents


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90,5,5", (0.9, 0.05, 0.05)),
        ("969,30,1", (0.969, 0.03, 0.001)),
        (" 8 , 1 , 1 ", (0.8, 0.1, 0.1)),
        ("1", (1.0, 0.0, 0.0)),
        ("3,1", (0.75, 0.25, 0.0)),
        ("0,0,2", (0.0, 0.0, 1.0)),
        ("0.5,0.25,0.25", (0.5, 0.25, 0.25)),
    ],
)
def test_parsing(text, expected):
    assert parse_split(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    ["", ",", "90,5,", "90;5;5", "a,b,c", "0,0,0", "90,-5,15", "1,1,1,1", "nan,1,1", "inf,1,1",
     "90,5,5%", "-1,-1,-1"],
)  # fmt: skip
def test_a_wrong_split_is_refused_with_its_text(text):
    with pytest.raises(UserError) as caught:
        parse_split(text)
    assert "training.split" in str(caught.value)
    assert repr(text) in str(caught.value)


def corpus_of(folder, lengths):
    return open_corpus(folder, [range(length) for length in lengths], parts=2)


def test_facts_count_tokens_and_samples_of_the_ranges(tmp_path):
    lengths = [5, 0, 7, 11, 1, 0, 13, 2, 3, 8]
    facts = describe_splits(corpus_of(tmp_path, lengths), "6,2,2", 4)
    for name, (first, last) in {"train": (0, 6), "valid": (6, 8), "test": (8, 10)}.items():
        assert facts[name].documents == (first, last)
        assert facts[name].first_token == sum(lengths[:first])
        assert facts[name].tokens == sum(lengths[first:last])
        assert facts[name].samples == max(0, math.ceil(sum(lengths[first:last]) / 4 - 1.25 + 1e-9))
    assert [facts[name].samples for name in SPLITS] == [5, 3, 2]


def test_an_empty_split_has_no_samples(tmp_path):
    facts = describe_splits(corpus_of(tmp_path, [5, 6, 7]), "1,0,0", 4)
    assert facts["train"].tokens == 18
    for name in ("valid", "test"):
        assert (facts[name].tokens, facts[name].samples) == (0, 0)
        assert facts[name].documents == (3, 3)


@pytest.mark.parametrize(
    ("lengths", "samples"), [([], 0), ([0, 4], 0), ([0, 5, 0], 1), ([9, 4], 3)]
)
def test_a_whole_corpus_as_one_split(tmp_path, lengths, samples):
    facts = whole_split(corpus_of(tmp_path, lengths), 4)
    assert facts.documents == (0, len(lengths))
    assert (facts.first_token, facts.tokens, facts.samples) == (0, sum(lengths), samples)
