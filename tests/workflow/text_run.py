"""A run over real texts: two corpora with their raw text, one pair made elsewhere, two phases."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from lib.config.run_config import RunConfig
from lib.data import shards
from lib.data.pair_description import PairTokenizer, describe_pair
from lib.data.tokenize import tokenize_corpus, tokenize_part
from lib.data.tokenized_corpus import sidecar_path
from lib.data.tokenizer import TextTokenizer, token_byte_lengths
from lib.data.tokens_manifest import MANIFEST_FILE
from lib.data.tokens_parts import Part
from tests.data.raw_example import write_raw
from tests.data.tiny_corpus import write_pair
from tests.data.tiny_tokenizer import save_tiny
from tests.data.tokenizing_example import Watcher, task_of
from tests.train.tiny_run import tiny_config

CODE, PROSE, PAIR = "code", "prose", "theirs"
PAIR_TEXTS = ["The quick brown fox", "", "jumps over \u4e16\u754c", "the lazy dog; 12345"] * 12


@dataclass(frozen=True)
class TextRun:
    """What ``write_texts`` has written, by the names of the corpora."""

    folder: Path
    tokenizer: TextTokenizer
    texts: dict[str, list[str]]
    manifests: dict[str, Path]

    ids_of: dict[str, list[int]] = field(default_factory=dict)

    @property
    def raw(self) -> Path:
        return self.folder / "data/raw"

    def ids(self, text: str) -> list[int]:
        """The tokens of a text and the one that ends a document; kept, since it is asked often."""
        if text not in self.ids_of:
            self.ids_of[text] = [*self.tokenizer.encode(text), self.tokenizer.eod_id]
        return self.ids_of[text]

    def config(self, tensor=1, pipeline=1, data=None, micro_batch_sizes=(1, 1), **rules):
        """Eight steps of 4, 4 and then 8 samples; from sample 24 on longer, in other shares."""
        return run_of(self.manifests, (tensor, pipeline, data), micro_batch_sizes, rules)


def run_of(manifests, layout, micro_batch_sizes, rules) -> RunConfig:
    tensor, pipeline, data = layout
    first, later = micro_batch_sizes
    section = {
        "blend": {CODE: 0.5, PROSE: 0.3, PAIR: 0.2},
        "phases": [
            {
                "from_samples": 24,
                "seq_length": 32,
                "micro_batch_size": later,
                "blend": {CODE: 0.2, PROSE: 0.8},
            }
        ],
    }
    changes = {f"data__{key}": value for key, value in (section | rules).items()}
    return tiny_config(
        manifests,
        training__train_iters=None,
        training__train_samples=56,
        training__micro_batch_size=first,
        training__rampup_start_batch_size=4,
        training__rampup_increment=4,
        training__rampup_samples=8,
        parallel__tensor=tensor,
        parallel__pipeline=pipeline,
        parallel__data=data,
        **changes,
    )


def texts_of(seed: int, count: int, words: list[str]) -> list[str]:
    """Texts of 0 to 120 words, some of them empty."""
    choose = random.Random(seed)
    sizes = [choose.choice([0, 1, 3, 10, 40, 120]) for _ in range(count)]
    return [" ".join(choose.choices(words, k=size)) for size in sizes]


def write_texts(folder: Path) -> TextRun:
    """Two corpora of small frames, one of them in two parts; some documents are left out."""
    tokenizer = save_tiny(folder / "data/tokenizer")
    texts = {
        CODE: texts_of(1, 60, ["def", "return", "first", "\n", "<|endoftext|>", "+"]),
        PROSE: texts_of(2, 50, ["dog", "Gr\u00fc\u00dfe", "\u4e16\u754c", "12345", "the"]),
        PAIR: PAIR_TEXTS,
    }
    manifests: dict[str, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_FRAME_BYTES", 500)
        for name in (CODE, PROSE):
            manifest = write_raw(folder / "data/raw" / name, texts[name], 2_000)
            assert len(manifest.shards) > 2
            assert all(len(shard.frames) > 1 for shard in manifest.shards[:-1])
            manifests[name] = folder / "data/tokens" / name / MANIFEST_FILE
    raw, out = folder / "data/raw", folder / "data/tokens"
    code = task_of(raw / CODE, folder / "data/tokenizer", out / CODE, min_document_tokens=3)
    for part in Part(2, 0).all_of_count():
        tokenize_part(code, part, Watcher())
    assert tokenize_corpus(code, Watcher()).short_documents > 0
    tokenize_corpus(task_of(raw / PROSE, folder / "data/tokenizer", out / PROSE), Watcher())
    manifests[PAIR] = write_imported(folder / "elsewhere/pair_text_document", tokenizer)
    return TextRun(folder, tokenizer, texts, manifests)


def write_imported(prefix: Path, tokenizer: TextTokenizer) -> Path:
    """A pair as made by another program, with its sidecar; empty documents leave boundaries."""
    prefix.parent.mkdir()
    ids = [tokenizer.encode(text) for text in PAIR_TEXTS]
    pair = write_pair(prefix, [each + [tokenizer.eod_id] * bool(each) for each in ids], np.int32)
    facts = PairTokenizer(tokenizer.fingerprint, tokenizer.eod_id, token_byte_lengths(tokenizer))
    describe_pair(pair, facts, append_eod=True).write(sidecar_path(prefix))
    return sidecar_path(prefix)
