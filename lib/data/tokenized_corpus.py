"""A tokenised corpus: one stream of tokens, however many pairs of files hold it.

The documents of all parts follow each other, and so do their tokens: positions and numbers of
documents run on from one part to the next, so that a corpus tokenised in n parts is the corpus
tokenised in one. Opening reads the manifest and the ends of each index: it takes the same time
for a thousand tokens as for 10^12. All positions are 64 bits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from lib.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from lib.data.pair_verification import verify_pair
from lib.data.tokens_manifest import MANIFEST_FILE, TokensManifest, TokensPart
from lib.errors import UserError


def sidecar_path(prefix: Path) -> Path:
    """``PREFIX.manifest.json``: the manifest of a pair of files that was made elsewhere."""
    return prefix.with_name(f"{prefix.name}.{MANIFEST_FILE}")


class TokenizedCorpus:
    """The tokens of a corpus, read on demand.

    Attributes:
        manifest: what it is: counts, tokenizer, options.
        parts: its pairs of files in order.
        dtype: type of the tokens in the files, as their headers say.
        num_tokens: tokens of all parts.
        num_documents: documents of all parts, empty ones included.
    """

    def __init__(self, manifest: TokensManifest, folder: Path) -> None:
        """Opens the parts of a manifest.

        Args:
            manifest: the manifest.
            folder: where the prefixes of its parts begin.

        Raises:
            UserError: where a file is missing or damaged, or is not the one described.
        """
        self.manifest = manifest
        self.parts = tuple(IndexedDataset(folder / part.prefix) for part in manifest.parts)
        for part, pair in zip(manifest.parts, self.parts, strict=True):
            _check_part(pair, part, manifest.dtype)
        self.dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        self._tokens = list(accumulate((pair.num_tokens for pair in self.parts), initial=0))
        self._documents = list(accumulate((pair.num_documents for pair in self.parts), initial=0))
        self.num_tokens = self._tokens[-1]
        self.num_documents = self._documents[-1]

    @classmethod
    def open(cls, manifest: Path) -> Self:
        """Opens a corpus by the path of its manifest: ``manifest.json``, or a ``sidecar_path``.

        Raises:
            UserError: as the constructor, and where the manifest is missing or damaged.
        """
        if manifest.name != MANIFEST_FILE and not manifest.exists():
            _refuse_without_sidecar(manifest)
        return cls(TokensManifest.load(manifest), manifest.parent)

    def read(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """The tokens at positions ``first`` to ``last`` - 1: a copy, int64 [last - first].

        Raises:
            IndexError: where they are not all there.
        """
        pieces = [
            self.parts[number].read(start - self._tokens[number], end - self._tokens[number])
            for number, start, end in self._pieces(first, last)
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *pieces], dtype=np.int64)

    def document_start(self, document: int) -> int:
        """Position at which a document begins; ``num_tokens`` for ``num_documents``."""
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        number = self._part_of(self._documents, document)
        local = document - self._documents[number]
        return self._tokens[number] + self.parts[number].document_start(local)

    def document_at(self, position: int) -> int:
        """The document that holds the token at ``position``, by binary search."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"token {position} of {self.num_tokens}")
        number = self._part_of(self._tokens, position)
        local = position - self._tokens[number]
        return self._documents[number] + self.parts[number].document_at(local)

    def document_starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Positions p, ``first`` < p < ``last``, at which a document begins: int64, rising.

        A document without tokens begins nowhere.

        Raises:
            IndexError: where ``first`` or ``last`` is outside [0, ``num_tokens``].
        """
        found = [np.empty(0, dtype=np.int64)]
        for number, _start, end in self._pieces(first, last):
            offset = self._tokens[number]
            # `first` is negative in a later part: that part's position 0 lies after it.
            found.append(self.parts[number].document_starts(first - offset, end - offset) + offset)
        return np.concatenate(found)

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Reads every byte of the corpus and checks it, which opening leaves out.

        Args:
            advance: called with the bytes that were read, for a progress bar.

        Raises:
            UserError: naming the file, where an index contradicts itself, a token is outside the
                vocabulary, or a file's sha256 is not the manifest's.
        """
        for part, pair in zip(self.manifest.parts, self.parts, strict=True):
            contents = verify_pair(pair, self.manifest.vocab_size, advance)
            for path, found, described in (
                (bin_path(pair.prefix), contents.bin_sha256, part.bin_sha256),
                (idx_path(pair.prefix), contents.idx_sha256, part.idx_sha256),
            ):
                if found != described:
                    raise UserError(
                        f"{path}: its sha256 is {found}, its manifest says {described}: it was "
                        "changed or exchanged; make the tokens, or their manifest, again"
                    )

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Where [first, last) lies: for each part its number and the positions of the piece.

        Raises:
            IndexError: where not all of it is there.
        """
        if not 0 <= first <= last <= self.num_tokens:
            raise IndexError(f"tokens {first} to {last} of {self.num_tokens}")
        for number in range(self._part_of(self._tokens, first), bisect_left(self._tokens, last)):
            yield number, max(first, self._tokens[number]), min(last, self._tokens[number + 1])

    def _part_of(self, edges: list[int], number: int) -> int:
        """The part that holds a position or document; the last one for what ends them all."""
        return min(bisect_right(edges, number), len(self.parts)) - 1


def _check_part(pair: IndexedDataset, part: TokensPart, dtype: str) -> None:
    """Refuses a pair that is not the one its manifest describes, as far as the header tells."""
    facts = {
        "documents": (pair.num_documents, part.documents),
        "tokens": (pair.num_tokens, part.tokens),
        "type of tokens": (pair.dtype.name, dtype),
    }
    for name, (found, described) in facts.items():
        if found != described:
            raise UserError(
                f"{pair.prefix}: {name} {found}, but its manifest says {described}: the files were "
                "exchanged; make the tokens, or their manifest, again"
            )


def _refuse_without_sidecar(manifest: Path) -> NoReturn:
    prefix = manifest.with_name(manifest.name.removesuffix(f".{MANIFEST_FILE}"))
    if not idx_path(prefix).exists():
        raise UserError(
            f"{idx_path(prefix)}: not there; name a pair of .bin and .idx by its prefix"
        )
    raise UserError(
        f"{manifest}: not there, and token files do not say which tokenizer made them; describe "
        f"them once: python -m stages.describe_tokens {prefix} --tokenizer data/tokenizer "
        "--append-eod (or --no-append-eod)"
    )
