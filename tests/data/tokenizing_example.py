"""What the tests of tokenising share: a corpus of many shards, a watcher, the tokens read back."""

import random

from lib.data import shards
from lib.data.indexed_dataset import IndexedDataset, bin_path
from lib.data.options import TokensOptions
from lib.data.tokenize import TokenizingTask, tokenize_corpus
from lib.data.tokens_manifest import MANIFEST_FILE, TokensManifest
from tests.data.raw_example import write_raw


class Watcher:
    """Counts, and calls a function after each frame."""

    def __init__(self, after_frame=lambda documents: None):
        self.begun = self.documents = 0
        self._after_frame = after_frame

    def begin(self, done):
        self.begun = done.documents

    def advance(self, done):
        self.documents += done.documents
        self._after_frame(self.documents)


def many_texts(count=400):
    choose = random.Random(3)
    words = ["def", "return", "dog", "\u4e16\u754c", "first", "\n", "12345", "+"]
    sizes = [choose.choice([0, 1, 5, 40, 200, 300]) for _ in range(count)]
    return [" ".join(choose.choices(words, k=size)) for size in sizes] + ["x y" * 40_000, "end"]


def small_shards(folder, monkeypatch):
    """A raw corpus of many small shards of several frames each; too small to start processes."""
    monkeypatch.setattr(shards, "_FRAME_BYTES", 8_000)
    manifest = write_raw(folder / "raw", many_texts(), 30_000)
    assert len(manifest.shards) >= 8
    assert any(len(shard.frames) > 2 for shard in manifest.shards)
    return folder / "raw"


def task_of(raw, tokenizer_folder, output, ray=None, **options):
    return TokenizingTask(raw, tokenizer_folder, output, TokensOptions(**options), ray)


def run(texts, tokenizer_folder, output, **options):
    raw = output.with_name("raw_texts")
    write_raw(raw, texts)
    return tokenize_corpus(task_of(raw, tokenizer_folder, output, **options), Watcher())


def documents_of(output):
    return [document for prefix in prefixes_of(output) for document in pair_of(prefix)]


def prefixes_of(output):
    return TokensManifest.load(output / MANIFEST_FILE).prefixes(output / MANIFEST_FILE)


def pair_of(prefix):
    dataset = IndexedDataset(prefix)
    assert dataset.num_documents == len(dataset)
    return [dataset[number].tolist() for number in range(len(dataset))]


def tokens_of(output):
    """The bytes of all parts, one after the other."""
    return b"".join(bin_path(prefix).read_bytes() for prefix in prefixes_of(output))
