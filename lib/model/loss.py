"""The one way from token windows to a loss, for training, validation and evaluation.

The loss is per token: the sum of token losses over the counted tokens of the whole batch divided
by their number. Every piece of a batch (micro batch, rank) contributes a sum and a count; nothing
ever takes a mean of means.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lib.model.gpt import GPTModel


@dataclass(frozen=True)
class MicroBatch:
    """The samples that go through the model at once.

    Attributes:
        tokens_SB: inputs, int64 [S, B].
        labels_SB: the token after each input, int64 [S, B].
        weights_SB: 1 where the label counts in the loss, else 0; fp32 [S, B].
        num_tokens: how many labels count.
    """

    tokens_SB: Tensor
    labels_SB: Tensor
    weights_SB: Tensor
    num_tokens: int

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device; copies from pinned memory do not block."""
        moved = (
            tensor.to(device, non_blocking=True)
            for tensor in (self.tokens_SB, self.labels_SB, self.weights_SB)
        )
        return MicroBatch(*moved, num_tokens=self.num_tokens)

    def pinned(self) -> "MicroBatch":
        """The same in page-locked memory, from which copies to a GPU run beside the work."""
        pinned = (
            tensor.pin_memory() for tensor in (self.tokens_SB, self.labels_SB, self.weights_SB)
        )
        return MicroBatch(*pinned, num_tokens=self.num_tokens)


def micro_batch(windows: np.ndarray, counted: np.ndarray) -> MicroBatch:
    """Makes a micro batch of windows.

    Args:
        windows: token ids, int64 [B, S + 1].
        counted: bool [B]; a sample that is there only to fill the batch does not count.
    """
    length = windows.shape[1] - 1
    tokens_SB = torch.from_numpy(np.ascontiguousarray(windows[:, :-1].T))
    labels_SB = torch.from_numpy(np.ascontiguousarray(windows[:, 1:].T))
    weights = np.broadcast_to(counted.astype(np.float32), (length, len(counted)))
    return MicroBatch(
        tokens_SB,
        labels_SB,
        torch.from_numpy(weights.copy()),
        num_tokens=length * int(counted.sum()),
    )


def token_losses(model: GPTModel, batch: MicroBatch) -> Tensor:
    """Loss of every token, zero where it does not count; fp32 or wider [S, B], nats."""
    return model(batch.tokens_SB, batch.labels_SB) * batch.weights_SB


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
    output = chunk(inputs, batch.labels_SB)
    return (output * batch.weights_SB).sum() if chunk.part.last else output
