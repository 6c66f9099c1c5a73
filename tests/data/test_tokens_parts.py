"""A corpus tokenised in parts: the same corpus, whatever their number."""

import pytest

from lib.data.tokenize import tokenize_corpus, tokenize_part
from lib.data.tokens_manifest import MANIFEST_FILE, read_left_out
from lib.data.tokens_parts import Part
from lib.errors import UserError
from tests.data.raw_example import file_hashes, write_raw
from tests.data.tiny_tokenizer import save_tiny
from tests.data.tokenizing_example import (
    Watcher,
    documents_of,
    many_texts,
    small_shards,
    task_of,
    tokens_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny(folder)
    return folder


@pytest.fixture
def many(tmp_path, monkeypatch):
    return small_shards(tmp_path, monkeypatch)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_are_the_same_corpus(folder, many, tmp_path, count):
    """Whatever their number and the order they are made in; joining copies nothing."""
    whole = tokenize_corpus(task_of(many, folder, tmp_path / "whole"), Watcher())
    task = task_of(many, folder, tmp_path / "t")
    made = [Part(count, index) for index in reversed(range(count))]
    records = [tokenize_part(task, part, Watcher()) for part in made]
    assert sum(record.part.documents for record in records) == whole.documents
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "t.partial/out").iterdir()}
    again = Watcher(lambda _: pytest.fail("a finished part is done again"))
    assert tokenize_part(task, made[0], again) == records[0]
    manifest = tokenize_corpus(task, again)
    assert again.begun == len(many_texts())
    assert tokens_of(tmp_path / "t") == tokens_of(tmp_path / "whole")
    assert documents_of(tmp_path / "t") == documents_of(tmp_path / "whole")
    assert manifest.model_dump(exclude={"parts"}) == whole.model_dump(exclude={"parts"})
    left_out = [read_left_out(tmp_path / name / MANIFEST_FILE) for name in ("t", "whole")]
    assert left_out[0].tolist() == left_out[1].tolist() != []
    assert inodes.items() <= {p.name: p.stat().st_ino for p in (tmp_path / "t").iterdir()}.items()
    assert not (tmp_path / "t.partial").exists()
    if count == 1:
        assert file_hashes(tmp_path / "t") == file_hashes(tmp_path / "whole")


def test_parts_that_are_missing_or_of_other_options_are_named(folder, many, tmp_path):
    task = task_of(many, folder, tmp_path / "t")
    tokenize_part(task, Part(3, 0), Watcher())
    tokenize_part(task, Part(3, 2), Watcher())
    with pytest.raises(UserError, match=r"t\.partial: .*the missing ones: --shard 1/3; or remove"):
        tokenize_corpus(task, Watcher())
    tokenize_part(task, Part(3, 1), Watcher())
    other = task_of(many, folder, tmp_path / "t", append_eod=False)
    with pytest.raises(UserError, match="--shard 0/3, --shard 1/3, --shard 2/3; or remove"):
        tokenize_corpus(other, Watcher())
    (tmp_path / "t.partial/out/corpus_text_document_01-of-03.bin").unlink()
    with pytest.raises(UserError, match="--shard 1/3; or remove"):
        tokenize_corpus(task, Watcher())


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "0/0", "a/b"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(UserError, match=f"--shard {text}: must be i/n"):
        Part.parse(text)


def test_more_parts_than_shards_are_refused(folder, tmp_path):
    write_raw(tmp_path / "raw", ["a"])
    assert Part.parse("1/2") == Part(2, 1)
    with pytest.raises(UserError, match=r"--shard 1/2: the corpus has only 1 shards"):
        tokenize_part(task_of(tmp_path / "raw", folder, tmp_path / "t"), Part(2, 1), Watcher())
