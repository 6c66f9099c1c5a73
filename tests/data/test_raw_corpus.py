"""A raw corpus as a whole: round trip, shards, manifest, and every way it may be damaged."""

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.documents import RawDocument
from lib.data.manifest import RawManifest, read_manifest, write_manifest
from lib.data.options import CorpusOptions
from lib.data.raw_corpus import collect_documents, write_corpus
from lib.data.rejections import Rejections
from lib.data.shards import iter_raw_documents, iter_shard_documents, write_shards
from lib.data.shuffle import EncodedDocument
from lib.data.sources import SourceFile, read_documents
from lib.errors import UserError

SECTION = "corpora.web"


def ignore(_count: int) -> None:
    pass


def build(folder: Path, documents: list[RawDocument], **settings: object) -> RawManifest:
    options = CorpusOptions.model_validate(settings)
    collect_documents(documents, options, folder, ignore)
    return write_corpus(options, Rejections(SECTION, options), folder, ignore)


def numbered(count: int, size: int = 100) -> list[RawDocument]:
    rng_text = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    return [RawDocument((text * size)[: 64 * size], "s", n) for n, text in enumerate(rng_text, 1)]


visible = st.text(min_size=1).filter(lambda text: not text.isspace())


@settings(deadline=None, max_examples=40)  # it writes files and syncs them
@given(st.lists(st.tuples(visible, st.text(), st.none() | st.integers(1)), min_size=1, max_size=20))
def test_any_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, fields: list[tuple[str, str, int | None]]
) -> None:
    folder = tmp_path_factory.mktemp("raw")
    documents = [RawDocument(*values) for values in fields]
    manifest = build(folder, documents)
    assert sorted(iter_raw_documents(folder), key=repr) == sorted(documents, key=repr)
    assert manifest.documents == len(documents)
    assert manifest.text_bytes == sum(len(document.text.encode()) for document in documents)


@settings(deadline=None, max_examples=40)  # it writes files and syncs them
@given(
    st.lists(visible, min_size=1, max_size=20), st.randoms(use_true_random=False), st.integers(0, 5)
)
def test_texts_in_files_of_any_layout_give_one_corpus(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], rng: random.Random, cut: int
) -> None:
    """Sources to shards to documents; the texts' order ignores files and their order."""
    options = CorpusOptions(on_bad_record="stop", source="files", paths=("unused",))
    orders = []
    for some in (contents, rng.sample(contents, len(contents))):
        folder = tmp_path_factory.mktemp("raw")
        files = []
        for part in (some[:cut], some[cut:]):
            path = tmp_path_factory.mktemp("source") / "a.jsonl"
            lines = [json.dumps({"text": text}, ensure_ascii=False) for text in part]
            path.write_bytes("\r\n".join(lines).encode())
            files.append(SourceFile(path, f"file {len(files)}"))
        documents = read_documents(options, files, Rejections(SECTION, options))
        collect_documents(documents, options, folder, ignore)
        write_corpus(options, Rejections(SECTION, options), folder, ignore)
        orders.append([document.text for document in iter_raw_documents(folder)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(contents)


def test_same_documents_same_bytes_and_shards_do_not_change_the_order(tmp_path: Path) -> None:
    documents = numbered(400)
    for name, megabytes in (("a", 1), ("b", 1), ("c", 64)):
        (tmp_path / name).mkdir()
        build(tmp_path / name, documents, shard_megabytes=megabytes)
    a, b, c = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc"
    )
    assert a == b
    assert len(a) == 4
    assert len(c) == 2
    assert list(iter_raw_documents(tmp_path / "a")) == list(iter_raw_documents(tmp_path / "c"))


def test_manifest_tells_what_is_there(tmp_path: Path) -> None:
    manifest = build(tmp_path, numbered(400), shard_megabytes=1, seed=7)
    assert read_manifest(tmp_path) == manifest
    plain = json.loads((tmp_path / "manifest.json").read_text())
    assert plain["format"] == 2
    assert plain["documents"] == sum(shard["documents"] for shard in plain["shards"]) == 400
    assert plain["options"]["seed"] == 7
    assert set(plain["versions"]) == {"python", "zstandard"}
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*(shard["name"] for shard in plain["shards"]), "manifest.json"]
    for shard in plain["shards"]:
        data = (tmp_path / shard["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["bytes"], shard["sha256"])
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as text:
            lines = text.read().splitlines()
        records = [json.loads(line) for line in lines]
        assert [set(record) for record in records] == [{"text", "source", "line"}] * len(records)
        assert sum(len(record["text"].encode()) for record in records) == shard["text_bytes"]
        assert len(records) == shard["documents"]
        assert shard["text_bytes"] <= 1_000_000
        assert sum(shard["frames"]) == shard["bytes"]


def test_corpus_checksum_is_over_the_shards_checksums(tmp_path: Path) -> None:
    manifest = build(tmp_path, numbered(400), shard_megabytes=1)
    lines = "".join(shard.sha256 + "\n" for shard in manifest.shards)
    assert manifest.corpus_sha256() == hashlib.sha256(lines.encode()).hexdigest()


def test_document_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    sizes = [3, 3, 50, 3, 10]
    encoded = [EncodedDocument(b'{"text": "x"}\n', size) for size in sizes]
    shards = write_shards(encoded, tmp_path, 10)
    assert [(shard.documents, shard.text_bytes) for shard in shards] == [
        (2, 6),
        (1, 50),
        (1, 3),
        (1, 10),
    ]


@settings(deadline=None, max_examples=25)  # it writes files and syncs them
@given(
    st.lists(st.sampled_from(["a", "a ", "A", "b", "\u00e9", "e\u0301"]), min_size=1, max_size=30)
)
def test_of_equal_texts_the_first_of_the_source_stays(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str]
) -> None:
    documents = [RawDocument(text, "s", line) for line, text in enumerate(contents, 1)]
    folders = [tmp_path_factory.mktemp("raw") for _ in range(2)]
    whole, kept = (
        build(folder, documents, deduplicate=choice)
        for folder, choice in zip(folders, (False, True), strict=True)
    )
    first: dict[str, RawDocument] = {}
    for document in documents:
        first.setdefault(document.text, document)
    everything, unique = (list(iter_raw_documents(folder)) for folder in folders)
    assert sorted(everything, key=repr) == sorted(documents, key=repr)
    assert unique == [each for each in everything if each in first.values()]
    assert sorted(unique, key=repr) == sorted(first.values(), key=repr)
    more = len(contents) - len(first)
    assert kept.rejected == ({"duplicate": more} if more else {})
    assert (whole.rejected, kept.documents) == ({}, len(first))


def test_no_documents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^corpora\.web\.source = .*no document was found"):
        build(tmp_path, [])


def test_full_disk_is_told(tmp_path: Path) -> None:
    def documents() -> Iterator[RawDocument]:
        yield from numbered(3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"No space left on device; free space"):
        collect_documents(documents(), CorpusOptions(), tmp_path, ignore)


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_remove(path: Path) -> None:
    path.unlink()


def damage_same_size_other_document(path: Path) -> None:
    """Sound in itself, and of the right length: only the checksum can tell."""
    size = path.stat().st_size
    data = zstandard.compress(b'{"text": "other", "source": "s", "line": 1}\n')
    skippable = size - len(data) - 8  # a zstd frame that readers skip fills the rest
    filler = b"\x50\x2a\x4d\x18" + skippable.to_bytes(4, "little") + bytes(skippable)
    path.write_bytes(data + filler)
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    "damage", [damage_flip, damage_cut, damage_remove, damage_same_size_other_document]
)
def test_damaged_shard_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    manifest = build(tmp_path, numbered(400), shard_megabytes=1)
    assert len(manifest.shards) == 3
    damage(tmp_path / "corpus-00001.jsonl.zst")
    with pytest.raises(UserError, match=r"corpus-00001.*download_corpus"):
        list(iter_raw_documents(tmp_path))
    for shard in (manifest.shards[0], manifest.shards[2]):
        assert len(list(iter_shard_documents(tmp_path, shard))) == shard.documents


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        ("", "Invalid JSON"),
        ('{"format": 1}', "format"),
        ("[]", "manifest"),
    ],
)
def test_manifest_that_is_none_is_an_error(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_manifest(tmp_path)
    assert f"python -m stages.download_corpus --corpus {tmp_path.name}" in str(caught.value)


def test_manifest_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, build(tmp_path, numbered(3)))
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"documents": 3', '"documents": 3, "extra": 1', 1))
    with pytest.raises(UserError, match="extra"):
        read_manifest(tmp_path)
