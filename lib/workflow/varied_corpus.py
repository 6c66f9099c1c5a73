"""A raw corpus of any size out of a small one, to measure tokenising with.

The corpus is taken again and again. Each time two consonants change places in all of its texts, so
that about as many new words appear as in real text, and nobody's cache of words helps more than it
would there.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path

from lib.data.documents import RawDocument, to_json_line
from lib.data.manifest import RawManifest, read_manifest, write_manifest
from lib.data.shards import iter_raw_documents, write_shards
from lib.data.shuffle import EncodedDocument

_CONSONANTS = "bcdfghjklmpqvwxz"
_SHARD_BYTES = 64_000_000


def write_varied_corpus(source: Path, raw: Path, lines: Path, text_bytes: int) -> RawManifest:
    """Writes a corpus of at least a size, as ``data/raw/NAME`` and as a plain file.

    Args:
        source: the corpus to vary, a folder such as ``data/raw/NAME``.
        raw: an empty folder.
        lines: a file to write: one document a line, as JSON with a key ``text``.
        text_bytes: UTF-8 bytes of text to reach.

    Returns:
        The manifest that ``raw`` got.
    """
    with lines.open("wb") as file:
        shards = write_shards(_written(_varied(source, text_bytes), file.write), raw, _SHARD_BYTES)
    manifest = read_manifest(source).model_copy(
        update={
            "shards": shards,
            "documents": sum(shard.documents for shard in shards),
            "text_bytes": sum(shard.text_bytes for shard in shards),
        }
    )
    write_manifest(raw, manifest)
    return manifest


def _written(
    documents: Iterator[EncodedDocument], write: Callable[[bytes], object]
) -> Iterator[EncodedDocument]:
    for document in documents:
        write(document.line)
        yield document


def _varied(source: Path, text_bytes: int) -> Iterator[EncodedDocument]:
    pairs = [(a + b, b + a) for a, b in combinations(_CONSONANTS, 2)]
    written = 0
    for times in count():
        # After all pairs, two at once.
        swaps = [pairs[times % len(pairs)], pairs[times // len(pairs)]] if times else []
        table = {ord(a): b for one in swaps for a, b in zip(*one, strict=True)}
        for document in iter_raw_documents(source):
            text = document.text.translate(table)
            size = len(text.encode())
            line = to_json_line(RawDocument(text, document.source, document.line))
            yield EncodedDocument(line, size)
            written += size
            if written >= text_bytes:
                return
