import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lib.data.tokenizer import (
    INFO_FILE,
    TOKENIZER_FILE,
    TokenizerInfo,
    load_tokenizer,
    save_tokenizer,
    token_byte_lengths,
)
from lib.data.tokenizer_training import train_byte_level_bpe
from lib.errors import UserError
from tests.data.tiny_tokenizer import EOD, TRAINING_TEXT, ignore, save_tiny, train


@pytest.fixture(scope="module")
def tokenizer():
    return train()


def test_vocabulary_is_exactly_the_size_asked(tokenizer):
    assert tokenizer.vocab_size == 300
    assert sorted(tokenizer.backend.get_vocab().values()) == list(range(300))
    assert tokenizer.eod_id == 0
    assert tokenizer.backend.id_to_token(0) == EOD
    assert tokenizer.info.special_tokens == {EOD: 0}


def test_bytes_alone():
    assert train(["x"], vocab_size=257).encode("a\u00e9") == train([""], 257).encode("a\u00e9")


def test_too_small_corpus_names_both_numbers_and_the_remedy_works():
    with pytest.raises(UserError, match=r"vocab_size = 5000.*vocabulary of (\d+)") as caught:
        train(vocab_size=5000)
    largest = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train(vocab_size=largest).vocab_size == largest


def test_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(UserError, match=r"vocab_size = 100.*at least 257"):
        train(vocab_size=100)


def test_reads_no_more_than_asked():
    taken = []
    endless = ("word number one and two\n" for _ in itertools.count())
    backend = train_byte_level_bpe(endless, 260, EOD, 1000, taken.append)
    assert sum(taken) == 1000
    exact = ("word number one and two\n" * 1000).encode()[:1000].decode()
    assert backend.to_str() == train([exact], 260).backend.to_str()


def test_limit_inside_a_character():
    assert train(["\u00e9" * 10], vocab_size=258, max_bytes=5).vocab_size == 258


def test_long_document_trains_in_pieces(monkeypatch):
    whole = train().backend.to_str()
    monkeypatch.setattr("lib.data.tokenizer_training._PIECE", 80)
    assert train().backend.to_str() == whole


_TRAIN = """
import hashlib, random
from lib.data.tokenizer_training import train_byte_level_bpe
r = random.Random(5)
words = ["".join(r.choices("abcdefgh", k=r.randint(2, 7))) for _ in range(3000)]
texts = [" ".join(r.choices(words, k=200)) for _ in range(300)]
backend = train_byte_level_bpe(texts, 700, "<e>", 10**6, lambda n: None)
print(hashlib.sha256(backend.to_str().encode()).hexdigest())
"""


def test_training_does_not_depend_on_threads():
    prints = set()
    for threads, parallel, seed in [("1", "false", "1"), ("1", "true", "2"), ("4", "true", "3")]:
        env = os.environ | {
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": parallel,
            "PYTHONHASHSEED": seed,
        }
        done = subprocess.run(
            [sys.executable, "-c", _TRAIN],
            cwd=Path(__file__).parents[2],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        prints.add(done.stdout)
    assert len(prints) == 1


@settings(deadline=None, max_examples=300)
@given(text=st.text())
@example(text="a\u0000b\u0000")
@example(text="a\ufeffb")
@example(text="\ufeff")
@example(text="a\r\nb\r\n\r\n  \t c")
@example(text=f"a{EOD}b")
@example(text="e\u0301 \u00e9 \ufb01 \u00a0\u2028 \U0001f468\u200d\U0001f469")
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=300)
@given(text=st.text() | st.text(alphabet="a \n.'1<|>\u00e9\u4e16"))
def test_byte_lengths_add_up(tokenizer, text):
    lengths = token_byte_lengths(tokenizer)
    assert lengths.dtype == np.int32
    assert lengths.shape == (300,)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_byte_length_of_control_tokens_is_zero(tokenizer):
    lengths = token_byte_lengths(tokenizer)
    assert lengths[tokenizer.eod_id] == 0
    assert np.count_nonzero(lengths == 0) == 1


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(st.sampled_from([EOD, " ", "a", "<|", "|>", "\n", "endoftext"])))
def test_text_never_gives_control_tokens(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text


def test_control_tokens_stand_for_no_text(tokenizer):
    ids = [*tokenizer.encode("one"), tokenizer.eod_id, *tokenizer.encode(" two")]
    assert tokenizer.decode(ids) == "one two"


def test_texts_together_are_as_texts_alone(tokenizer, monkeypatch):
    monkeypatch.setattr("lib.data.tokenizer.PIECE", 20)
    monkeypatch.setattr("lib.data.long_texts.PIECE", 20)
    texts = ["", "short", TRAINING_TEXT, "", "x" * 50, "end"]
    together = [ids.tolist() for ids in tokenizer.encode_many(texts)]
    assert together == [tokenizer.encode(text) for text in texts]


def test_saved_and_loaded(tmp_path):
    saved = save_tiny(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.info == saved.info
    text = f"{TRAINING_TEXT} {EOD}"
    assert loaded.encode(text) == saved.encode(text)
    assert loaded.eod_id not in loaded.encode(text)
    assert loaded.fingerprint == saved.fingerprint
    content = json.loads((tmp_path / "tokenizer" / INFO_FILE).read_text())
    assert content["format"] == 1
    assert content["end_of_document"] == {"token": EOD, "id": 0}
    assert content["vocab_size"] == 300


def test_saving_is_deterministic(tmp_path):
    save_tiny(tmp_path / "a")
    save_tiny(tmp_path / "b")
    for name in (TOKENIZER_FILE, INFO_FILE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_fingerprint_does_not_depend_on_spacing(tmp_path):
    save_tiny(tmp_path)
    path = tmp_path / TOKENIZER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert load_tokenizer(tmp_path).vocab_size == 300


def test_another_tokenizer_under_the_same_info_is_refused(tmp_path):
    save_tiny(tmp_path / "a")
    save_tiny(tmp_path / "b", vocab_size=301)
    (tmp_path / "b" / TOKENIZER_FILE).replace(tmp_path / "a" / TOKENIZER_FILE)
    with pytest.raises(UserError, match="not the tokenizer that"):
        load_tokenizer(tmp_path / "a")


@pytest.mark.parametrize("name", [TOKENIZER_FILE, INFO_FILE])
def test_missing_or_damaged_files_are_named(tmp_path, name):
    save_tiny(tmp_path)
    for damaged in ("", "{", '{"format": 1}'):
        (tmp_path / name).write_text(damaged)
        with pytest.raises(UserError, match=name):
            load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: not there"):
        load_tokenizer(tmp_path)


def test_info_is_typed():
    with pytest.raises(ValueError, match="vocab_size"):
        TokenizerInfo.model_validate({"kind": "gpt2"})


def test_saving_replaces_the_old_folder_whole(tmp_path):
    save_tiny(tmp_path / "t")
    (tmp_path / "t" / "stray").write_text("x")
    save_tokenizer(tmp_path / "t", train())
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [TOKENIZER_FILE, INFO_FILE]


def test_progress_counts_bytes():
    taken = []
    train_byte_level_bpe([TRAINING_TEXT, ""], 300, EOD, 10**6, taken.append)
    assert sum(taken) == len(TRAINING_TEXT.encode())
    ignore(0)
