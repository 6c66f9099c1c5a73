"""Where documents begin in the sequences of a micro batch, for positions and attention.

A window of the token stream may begin within a document, hold several and end within one. Where
they begin comes from the index of the corpus and never from token values: an end-of-document token
says nothing of a document that was made without one. For one sequence of 8 tokens (E ends a
document) whose documents begin at 3, 6 and 7:

    tokens      a  b  E  c  d  E  E  f
    positions   0  1  2  0  1  2  0  0
    numbers     0  0  0  1  1  1  2  3

Shape legend: S sequence, B batch, N documents of the micro batch, pieces cut by a window included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Which tokens attend to each other: those of one document, causally.

    Attributes:
        number_SB: number of the token's document within its sequence, from 0; int32 [S, B].
        offsets: where each document begins, and the end of the last one, in the tokens of all
            sequences one after another; int32 [N + 1].
        longest: tokens of the longest document.
    """

    number_SB: Tensor
    offsets: Tensor
    longest: int

    def allowed(self) -> Tensor:
        """Whether each query (third dimension) sees each key (fourth); bool [B, 1, S, S]."""
        number_BS = self.number_SB.T
        same_BSS = number_BS[:, :, None] == number_BS[:, None, :]
        return same_BSS.tril().unsqueeze(1)

    def to(self, device: torch.device) -> "Documents":
        """The same on another device; copies from pinned memory do not block."""
        number_SB = self.number_SB.to(device, non_blocking=True)
        return Documents(number_SB, self.offsets.to(device, non_blocking=True), self.longest)

    def pinned(self) -> "Documents":
        """The same in page-locked memory."""
        return Documents(self.number_SB.pin_memory(), self.offsets.pin_memory(), self.longest)


@dataclass(frozen=True)
class DocumentLayout:
    """What the model is told of the documents of a micro batch.

    Attributes:
        positions_SB: place of each token in its document, int64 [S, B], from 0 also in a piece
            whose document began in an earlier window; None: the place in the window.
        documents: within which tokens attend; None: within the window.
    """

    positions_SB: Tensor | None = None
    documents: Documents | None = None

    def to(self, device: torch.device) -> "DocumentLayout":
        """The same on another device; copies from pinned memory do not block."""
        positions_SB, documents = self.positions_SB, self.documents
        return DocumentLayout(
            None if positions_SB is None else positions_SB.to(device, non_blocking=True),
            None if documents is None else documents.to(device),
        )

    def pinned(self) -> "DocumentLayout":
        """The same in page-locked memory."""
        positions_SB, documents = self.positions_SB, self.documents
        return DocumentLayout(
            None if positions_SB is None else positions_SB.pin_memory(),
            None if documents is None else documents.pinned(),
        )


def document_positions(starts: Sequence[np.ndarray], length: int) -> Tensor:
    """The place of each token in its document, int64 [S, B].

    Args:
        starts: of each sequence, the places at which documents begin, in any order. Its place 0
            begins a piece in any case, and places from ``length`` on say nothing of it.
        length: S.
    """
    place = np.arange(length)
    first_BS = np.maximum.accumulate(np.where(_begins(starts, length), place, 0), axis=1)
    return _sequence_first(place - first_BS)


def find_documents(starts: Sequence[np.ndarray], length: int) -> Documents:
    """The documents that attention stays within; arguments as of ``document_positions``."""
    begins_BS = _begins(starts, length)
    offsets = np.append(np.flatnonzero(begins_BS), begins_BS.size)
    return Documents(
        number_SB=_sequence_first(np.cumsum(begins_BS, axis=1, dtype=np.int32) - 1),
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=int(np.diff(offsets).max()),
    )


def _begins(starts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Whether a document, or a piece of one, begins at each place; bool [B, S]."""
    begins_BS = np.zeros((len(starts), length), dtype=bool)
    begins_BS[:, 0] = True
    for row, places in enumerate(starts):
        begins_BS[row, places[places < length]] = True
    return begins_BS


def _sequence_first(x_BS: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x_BS.T))
