"""The one way from token windows to a loss, for training, validation and evaluation.

The loss is per token: the sum of token losses over the counted tokens of the whole batch divided
by their number. Every piece of a batch (micro batch, rank) contributes a sum and a count; nothing
ever takes a mean of means.

What does not count is known by its place (samples that only fill a batch), or by the rule that
labels which end a document do not count; a token's value alone never makes it padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lib.config.data_facts import DataFacts
from lib.layers.documents import DocumentLayout, document_positions, find_documents
from lib.model.gpt import GPTModel


@dataclass(frozen=True)
class SampleRules:
    """What the documents of a window mean to the loss and to the model; by default nothing.

    Attributes:
        eod_id: labels of this id, which ends a document, do not count; None: all labels count.
        reset_positions: positions begin at 0 in each document.
        within_documents: tokens attend only to those of their own document.
    """

    eod_id: int | None = None
    reset_positions: bool = False
    within_documents: bool = False

    @classmethod
    def of(cls, data: DataFacts) -> Self:
        """The rules that a run is trained by."""
        return cls(
            eod_id=None if data.eod_in_loss else data.eod_id,
            reset_positions=data.positions == "document",
            within_documents=data.attention == "document",
        )

    @property
    def need_starts(self) -> bool:
        """Whether micro batches must know where documents begin."""
        return self.reset_positions or self.within_documents


_PLAIN = SampleRules()


@dataclass(frozen=True)
class MicroBatch:
    """The samples that go through the model at once.

    Attributes:
        tokens_SB: inputs, int64 [S, B].
        labels_SB: the token after each input, int64 [S, B].
        weights_SB: 1 where the label counts in the loss, else 0; fp32 [S, B].
        num_tokens: how many labels count.
        layout: where documents lie; None if that means nothing to the model.
    """

    tokens_SB: Tensor
    labels_SB: Tensor
    weights_SB: Tensor
    num_tokens: int
    layout: DocumentLayout | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device; copies from pinned memory do not block."""
        moved = (
            tensor.to(device, non_blocking=True)
            for tensor in (self.tokens_SB, self.labels_SB, self.weights_SB)
        )
        layout = None if self.layout is None else self.layout.to(device)
        return MicroBatch(*moved, num_tokens=self.num_tokens, layout=layout)

    def pinned(self) -> "MicroBatch":
        """The same in page-locked memory, from which copies to a GPU run beside the work."""
        pinned = (
            tensor.pin_memory() for tensor in (self.tokens_SB, self.labels_SB, self.weights_SB)
        )
        layout = None if self.layout is None else self.layout.pinned()
        return MicroBatch(*pinned, num_tokens=self.num_tokens, layout=layout)


def micro_batch(
    windows: np.ndarray,
    counted: np.ndarray,
    rules: SampleRules = _PLAIN,
    starts: Sequence[np.ndarray] | None = None,
) -> MicroBatch:
    """Makes a micro batch of windows.

    Args:
        windows: token ids, int64 [B, S + 1].
        counted: bool [B]; a sample that is there only to fill the batch does not count.
        rules: what documents mean.
        starts: of each window, the places in it at which documents begin; wanted only if
            ``rules.need_starts``.
    """
    labels_BS = windows[:, 1:]
    counts_BS = np.broadcast_to(counted[:, None], labels_BS.shape)
    if rules.eod_id is not None:
        counts_BS = counts_BS & (labels_BS != rules.eod_id)
    return MicroBatch(
        tokens_SB=torch.from_numpy(np.ascontiguousarray(windows[:, :-1].T)),
        labels_SB=torch.from_numpy(np.ascontiguousarray(labels_BS.T)),
        weights_SB=torch.from_numpy(np.ascontiguousarray(counts_BS.T, dtype=np.float32)),
        num_tokens=int(np.count_nonzero(counts_BS)),
        layout=_layout(rules, starts, labels_BS.shape),
    )


def _layout(
    rules: SampleRules, starts: Sequence[np.ndarray] | None, shape: tuple[int, ...]
) -> DocumentLayout | None:
    """Of windows whose labels have the shape [B, S]."""
    if not rules.need_starts:
        return None
    rows, length = shape
    assert starts is not None
    assert len(starts) == rows
    return DocumentLayout(
        document_positions(starts, length) if rules.reset_positions else None,
        find_documents(starts, length) if rules.within_documents else None,
    )


def token_losses(model: GPTModel, batch: MicroBatch) -> Tensor:
    """Loss of every token, zero where it does not count; fp32 or wider [S, B], nats."""
    return model(batch.tokens_SB, batch.labels_SB, batch.layout) * batch.weights_SB


def run_chunk(chunk: GPTModel, batch: MicroBatch, received: Tensor | None) -> Tensor:
    """One micro batch's way through one chunk of the model.

    Args:
        chunk: this rank's part of the model, or one of its parts.
        batch: the micro batch.
        received: hidden states of the chunk before, [S, B, H]; None for the first.

    Returns:
        Hidden states for the next chunk; of the last one the summed loss of the counted tokens.
    """
    inputs = batch.tokens_SB if received is None else received
    output = chunk(inputs, batch.labels_SB, batch.layout)
    return (output * batch.weights_SB).sum() if chunk.part.last else output
