"""Shards: frames that open alone, whatever the documents."""

import hashlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import shards
from lib.data.documents import RawDocument
from lib.data.shards import frame_size, frame_texts, iter_raw_documents
from lib.errors import UserError
from tests.data.raw_example import write_raw


def frames_of(folder, shard):
    data = (folder / shard.name).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (shard.bytes, shard.sha256)
    assert sum(shard.frames) == shard.bytes
    start = 0
    for size in shard.frames:
        yield data[start : start + size]
        start += size


@settings(deadline=None, max_examples=40)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=20))
def test_each_frame_holds_whole_documents(tmp_path_factory, texts):
    """Read frame by frame, one by one, or by zstd as one stream: the same documents in order."""
    folder = tmp_path_factory.mktemp("raw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_FRAME_BYTES", 60)
        manifest = write_raw(folder, texts, 150)
    expected = [RawDocument(text, "s", line) for line, text in enumerate(texts, start=1)]
    assert list(iter_raw_documents(folder)) == expected
    found = []
    for shard in manifest.shards:
        documents = []
        for frame in frames_of(folder, shard):
            in_frame = frame_texts(frame, folder)
            size = sum(len(text.encode()) for text in in_frame)
            assert size <= 60 or len(in_frame) == 1
            assert frame_size(frame, folder) == len(zstandard.decompress(frame))
            documents += in_frame
        assert len(documents) == shard.documents
        found += documents
    assert found == texts


def test_a_frame_that_is_none_is_named(tmp_path):
    manifest = write_raw(tmp_path, ["a text", "another"])
    (frame,) = frames_of(tmp_path, manifest.shards[0])
    path = tmp_path / "shard"
    for wrong in (frame[:-1], frame + b"\0", frame[:20] + b"xxx" + frame[23:], b"", b"{}"):
        with pytest.raises(UserError, match=r"shard: damaged.*download_corpus"):
            frame_texts(wrong, path)
    with pytest.raises(UserError, match="shard: damaged"):
        frame_size(b"no frame at all", path)
