"""Keyed-hash order against a plain in-memory sort by the same definition."""

import hashlib
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.documents import RawDocument, from_json_line
from lib.data.shuffle import gather, scatter

texts = st.lists(st.text(max_size=30), max_size=40)


def shuffled(documents: list[RawDocument], seed: int, folder: Path) -> list[RawDocument]:
    assert scatter(documents, seed, folder, lambda _count: None) == len(documents)
    return [from_json_line(encoded.line) for encoded in gather(folder, lambda _count: None)]


def from_texts(contents: list[str]) -> list[RawDocument]:
    return [RawDocument(text, "source", line) for line, text in enumerate(contents, 1)]


@settings(deadline=None)  # it writes files
@given(texts, st.integers(0, 2**64))
def test_order_is_that_of_the_hash_with_ties_in_source_order(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], seed: int
) -> None:
    documents = from_texts(contents)
    expected = sorted(  # sorted() is stable: ties keep the source's order
        documents,
        key=lambda document: hashlib.blake2b(
            document.text.encode(), digest_size=16, key=str(seed).encode()
        ).digest(),
    )
    assert shuffled(documents, seed, tmp_path_factory.mktemp("buckets")) == expected


@settings(deadline=None)  # it writes files
@given(texts, st.randoms(use_true_random=False))
def test_order_of_texts_does_not_depend_on_the_order_of_input(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], rng: random.Random
) -> None:
    other = rng.sample(contents, len(contents))
    orders = [
        [d.text for d in shuffled(from_texts(some), 1, tmp_path_factory.mktemp("buckets"))]
        for some in (contents, other)
    ]
    assert orders[0] == orders[1]


def test_seed_changes_the_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = from_texts([str(number) for number in range(300)])
    orders = [shuffled(documents, seed, tmp_path_factory.mktemp("b")) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert orders[0] != documents


def test_ranges_are_alike(tmp_path: Path) -> None:
    """Sorted input, two kinds: in each tenth of the output, each kind has its share.

    The hypergeometric standard deviation of a tenth is 20 documents; five of them are allowed.
    """
    documents = from_texts([f"kind {number // 10_000}, {number}" for number in range(20_000)])
    order = shuffled(documents, 1234, tmp_path)
    for start in range(0, 20_000, 2_000):
        kinds = Counter(document.text[:6] for document in order[start : start + 2_000])
        assert abs(kinds["kind 0"] - 1_000) < 100


def test_large_documents_and_sizes(tmp_path: Path) -> None:
    rng = random.Random(0)
    documents = from_texts(["\u00e4" * rng.choice([1, 100, 1_000_000]) for _ in range(20)])
    scatter(documents, 0, tmp_path, lambda _count: None)
    for encoded in gather(tmp_path, lambda _count: None):
        assert len(from_json_line(encoded.line).text) * 2 == encoded.text_bytes


def test_progress_adds_up_and_buckets_are_removed(tmp_path: Path) -> None:
    read: list[int] = []
    written: list[int] = []
    scatter(from_texts([str(number) for number in range(1_234)]), 0, tmp_path, read.append)
    assert sum(1 for _ in gather(tmp_path, written.append)) == 1_234
    assert sum(read) == sum(written) == 1_234
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "x" * 10_000_000])
def test_one_document(tmp_path: Path, text: str) -> None:
    document = RawDocument(text, "a", None)
    assert shuffled([document], 0, tmp_path) == [document]


@settings(deadline=None)  # it writes files
@given(st.lists(st.sampled_from(["", "a", "b", "bb", "\n", "\u4e16"]), max_size=30))
def test_of_equal_texts_the_first_of_the_source_stays(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str]
) -> None:
    documents = from_texts(contents)
    folder = tmp_path_factory.mktemp("buckets")
    scatter(documents, 1, folder, lambda _count: None)
    left_out: list[None] = []
    advanced: list[int] = []
    found = [
        from_json_line(encoded.line)
        for encoded in gather(folder, advanced.append, lambda: left_out.append(None))
    ]
    first = {document.text: document for document in reversed(documents)}
    assert sorted(found, key=repr) == sorted(first.values(), key=repr)
    assert len(left_out) == len(documents) - len(found)
    assert sum(advanced) == len(documents)
