"""From tokens back to texts: which documents a sample holds, and where each came from.

A sample is a range of positions in a tokenised corpus, and the index says which documents lie
there. The raw corpus has the same documents in the same order, and some more that gave no tokens:
``left_out.npy`` has their numbers. Its manifest counts the documents of each shard and frame, so
that a document is found by arithmetic and costs the reading of one frame.
"""

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zstandard

from lib.data.compressed import lines_of
from lib.data.documents import RawDocument, from_json_line
from lib.data.manifest import MANIFEST_NAME, RawManifest, check_size, read_manifest
from lib.data.tokenized_corpus import TokenizedCorpus
from lib.data.tokens_manifest import raw_document_of, read_left_out
from lib.errors import UserError

# Frames that are kept: a document may come several times in a row. A frame is about a megabyte.
_CACHED_FRAMES = 4


@dataclass(frozen=True)
class Piece:
    """The part of a document that a sample holds.

    Attributes:
        document: number of the document in the tokenised corpus.
        place: where in the sample the piece begins.
        first: the piece begins with this token of the document, counted from 0.
        last: and ends before this one.
        length: tokens of the whole document, its end included.
    """

    document: int
    place: int
    first: int
    last: int
    length: int


class Origin(NamedTuple):
    """A document as a person knows it.

    Attributes:
        text: the whole text; what its tokens stand for, where the raw corpus is not at hand.
        source: the file, URL or data set it came from; None without a raw corpus.
        line: its line or row there, from 1; None where the source is one document.
        raw_document: its number in the raw corpus; None without one.
    """

    text: str
    source: str | None = None
    line: int | None = None
    raw_document: int | None = None


def pieces_of(corpus: TokenizedCorpus, start: int, end: int) -> list[Piece]:
    """What lies at the positions ``start`` to ``end`` - 1 of a corpus, in order.

    Raises:
        IndexError: where they are not all there.
    """
    edges = [start, *corpus.document_starts(start, end).tolist(), end]
    pieces: list[Piece] = []
    for first, last in itertools.pairwise(edges):
        document = corpus.document_at(first)
        begin, following = (corpus.document_start(document + n) for n in (0, 1))
        pieces.append(
            Piece(document, first - start, first - begin, last - begin, following - begin)
        )
    return pieces


class RawDocuments:
    """The documents of a raw corpus by their number.

    Attributes:
        manifest: of the corpus.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the manifest of ``folder``.

        Raises:
            UserError: there is none, or it is damaged.
        """
        self.manifest = read_manifest(folder)
        self._folder = folder
        self._ends = list(itertools.accumulate(shard.documents for shard in self.manifest.shards))
        self._frame = functools.lru_cache(_CACHED_FRAMES)(self._read_frame)

    def read(self, number: int) -> RawDocument:
        """A document; numbers run over all shards.

        Raises:
            IndexError: there is no such document.
            UserError: its shard is not the one that the manifest describes.
        """
        if not 0 <= number < self.manifest.documents:
            raise IndexError(f"document {number} of {self.manifest.documents}")
        place = bisect_right(self._ends, number)
        shard = self.manifest.shards[place]
        number -= self._ends[place] - shard.documents
        ends = list(itertools.accumulate(shard.frame_documents))
        frame = bisect_right(ends, number)
        return self._frame(place, frame)[number - ends[frame]]

    def _read_frame(self, place: int, frame: int) -> "_Frame":
        shard = self.manifest.shards[place]
        path = check_size(self._folder, shard)
        with path.open("rb") as file:
            file.seek(sum(shard.frames[:frame]))
            data = file.read(shard.frames[frame])
        try:
            # A frame has a checksum of its own, which this looks at.
            text = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _damaged(path, str(error)) from None
        lines = list(lines_of([text]))
        if len(lines) != shard.frame_documents[frame]:
            raise _damaged(path, f"frame {frame} has {len(lines)} documents")
        return _Frame(path, lines)


class _Frame:
    """The lines of a frame; a line is parsed when its document is wanted."""

    def __init__(self, path: Path, lines: Sequence[bytes]) -> None:
        self._path = path
        self._lines = lines

    def __getitem__(self, index: int) -> RawDocument:
        try:
            return from_json_line(self._lines[index])
        except (ValueError, TypeError) as error:
            raise _damaged(self._path, str(error)) from None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path}: damaged, it does not match its manifest ({reason}); make it again: "
        "python -m stages.download_corpus"
    )


class DocumentOrigins:
    """The texts and sources of a tokenised corpus's documents.

    Attributes:
        missing: why the raw corpus is not at hand, in words; None where it is.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        manifest: Path,
        raw: Path,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Finds the raw corpus.

        Args:
            corpus: the tokenised corpus.
            manifest: the path that it was opened by.
            raw: where its raw corpus should be.
            decode: the text of tokens, used where there is no raw corpus.

        Raises:
            UserError: the raw corpus is damaged, or ``left_out.npy`` is.
        """
        self.missing = _why_missing(corpus, raw)
        self._corpus = corpus
        self._decode = decode
        self._raw = None if self.missing else RawDocuments(raw)
        self._left_out = None if self.missing else read_left_out(manifest)

    def find(self, document: int) -> Origin:
        """The origin of a document of the tokens."""
        if self._raw is None or self._left_out is None:
            first, last = (self._corpus.document_start(document + n) for n in (0, 1))
            return Origin(self._decode(self._corpus.read(first, last).tolist()))
        number = raw_document_of(document, self._left_out)
        found = self._raw.read(number)
        return Origin(found.text, found.source, found.line, number)


def _why_missing(corpus: TokenizedCorpus, raw: Path) -> str | None:
    made_from = corpus.manifest.corpus_sha256
    if made_from is None:
        return "its tokens were made elsewhere, and there is no raw corpus"
    if not (raw / MANIFEST_NAME).exists():
        return f"{raw} is not there"
    if read_manifest(raw).corpus_sha256() != made_from:
        return f"{raw} is another corpus than the one that the tokens were made from"
    return None


def raw_manifest_of(corpus: TokenizedCorpus, raw: Path) -> RawManifest | None:
    """The manifest of the raw corpus that tokens were made from; None where it is not at hand."""
    return None if _why_missing(corpus, raw) else read_manifest(raw)
