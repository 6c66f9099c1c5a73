"""A summary of a corpus, against counts by hand; memory stays flat whatever the pieces are."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel

from lib.data import corpus_summary
from lib.data.corpus_summary import LengthHistogram, count_token, summarise, unknown_token
from lib.data.length_drawing import as_svg, as_text
from lib.data.tokenizer import TextTokenizer, describe_tokenizer
from tests.data.tiny_corpus import open_corpus
from tests.data.tiny_tokenizer import train

SVG = "{http://www.w3.org/2000/svg}"
DOCUMENTS = [[1], [1], [], [], [2, 3], [2, 4], [2, 4], [2, 4], [5] * 9, [5] * 9, [6] * 9, [1], []]


def made_here(corpus, sha256="aa"):
    corpus.manifest = corpus.manifest.model_copy(update={"corpus_sha256": sha256})
    return corpus


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
def test_lengths_are_counted_in_bins(lengths):
    histogram = LengthHistogram()
    for part in np.array_split(np.array(lengths, dtype=np.int64), 3):
        if part.size:
            histogram.add(part)
    assert (histogram.shortest, histogram.longest) == (min(lengths), max(lengths))
    bins = histogram.bins()
    assert sum(documents for _, _, documents, _ in bins) == len(lengths)
    for first, last, documents, tokens in bins:
        inside = [length for length in lengths if first <= length <= last]
        assert (documents, tokens) == (len(inside), sum(inside))
        assert last == (0 if first == 0 else 2 * first - 1)
    assert bins[0][2]
    assert bins[-1][2]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 16])
def test_equal_neighbours_are_duplicates(tmp_path, monkeypatch, chunk, parts):
    """Whatever is looked at in one go, and over the border of two parts."""
    monkeypatch.setattr(corpus_summary, "_CHUNK", chunk)
    monkeypatch.setattr(corpus_summary, "_MOST_TOKENS", chunk)
    corpus = open_corpus(tmp_path, DOCUMENTS, parts=parts)
    looked_at = []
    summary = summarise(made_here(corpus), looked_at.append)
    assert summary.duplicates == 1 + 2 + 1
    assert sum(looked_at) == len(DOCUMENTS)
    assert max(looked_at) <= chunk
    expected = LengthHistogram()
    expected.add(np.array([len(each) for each in DOCUMENTS]))
    assert summary.lengths.bins() == expected.bins()
    assert count_token(corpus, 5) == 18
    assert count_token(corpus, 77) == 0


def test_duplicates_of_a_pair_made_elsewhere_are_not_counted(tmp_path):
    corpus = open_corpus(tmp_path, DOCUMENTS)
    assert summarise(corpus).duplicates is None


def test_a_corpus_without_documents(tmp_path):
    assert summarise(open_corpus(tmp_path, [])).lengths.bins() == []


def tokenizer_of(model):
    backend = Tokenizer(model)
    backend.add_special_tokens(["<eod>"])
    return TextTokenizer(backend, describe_tokenizer(backend, "tokenizer_json", "<eod>"))


def test_the_unknown_token_is_found_where_there_is_one():
    words = {"a": 0, "[UNK]": 1, "b": 2}
    assert unknown_token(tokenizer_of(WordLevel(words, unk_token="[UNK]"))) == 1
    assert unknown_token(tokenizer_of(BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>"))) == 1
    letters = {"<": 0, "e": 1, "o": 2, "d": 3, ">": 4, "<eod>": 5}
    assert unknown_token(tokenizer_of(BPE(letters, [], unk_token="<eod>"))) is None
    assert unknown_token(tokenizer_of(BPE({"a": 0}, []))) is None
    assert unknown_token(train()) is None


def test_pictures():
    histogram = LengthHistogram()
    histogram.add(np.array([0, 1, 1, 1, 6, 1000]))
    lines = as_text(histogram, 100).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "4"]
    assert "4 to 7" in lines[4]
    assert lines[-1].startswith("512 to 1,023")
    bars = [line.count("#") for line in lines[1:]]
    assert max(bars) == bars[1] > bars[0] > bars[2] == 0
    assert all(len(line) <= 100 for line in lines)
    assert "99.11% of the tokens" in lines[-1]
    groups = ElementTree.fromstring(as_svg(histogram, "code: lengths")).findall(f"{SVG}g")
    assert len(groups) == len(lines) - 1
    widths = [[float(bar.attrib["width"]) for bar in group.iter(f"{SVG}rect")] for group in groups]
    share = np.array([1, 3, 0, 1, 0, 0, 0, 0, 0, 0, 1]) / 6
    tokens = np.array([0, 3, 0, 6, 0, 0, 0, 0, 0, 0, 1000]) / 1009
    np.testing.assert_allclose(
        np.array(widths).T, np.array([share, tokens]) * 480 / tokens[-1], atol=0.1
    )
