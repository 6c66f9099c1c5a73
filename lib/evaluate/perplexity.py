"""Loss of a model on held-out text, in units that can be compared.

    loss            nats per token; depends on the tokenizer
    perplexity      exp(loss); likewise
    bits per byte   total nats / ln 2 / bytes of text predicted; comparable across tokenizers

Special tokens (the end of a document) count as tokens but stand for no bytes. The split is read
in the windows that training reads (lib/data/samples.py): each label of a window is predicted once,
from at least one token and at most ``seq_length`` tokens of context. What is left of the split
after its last whole window, fewer than ``seq_length`` labels, is not measured.

``unigram_entropy`` is the entropy of the labels' own frequencies: no model that ignores context
can do better on them, so a model that has learnt anything lies below it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lib.data.samples import SampleWindows
from lib.model.gpt import GPTModel
from lib.model.loss import micro_batch, token_losses
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import forward_only


@dataclass(frozen=True)
class HeldOutLoss:
    """What was measured on a split.

    Attributes:
        tokens: labels predicted.
        text_bytes: bytes of text they stand for.
        loss: mean loss in nats per token.
        unigram_entropy: nats per token.
        loss_by_position: mean loss at each position of the window, fp64 [S].
    """

    tokens: int
    text_bytes: int
    loss: float
    unigram_entropy: float
    loss_by_position: npt.NDArray[np.float64]

    @property
    def perplexity(self) -> float:
        """exp(loss), with Megatron's cap of exp(20)."""
        return math.exp(min(20.0, self.loss))

    @property
    def bits_per_byte(self) -> float:
        """Bits needed per byte of text."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of a distribution given by counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def measure_loss(
    model: GPTModel,
    windows: SampleWindows,
    byte_lengths: npt.NDArray[np.int32],
    *,
    batch_size: int,
    num_samples: int,
    advance: Callable[[int], None],
) -> HeldOutLoss:
    """Runs the first ``num_samples`` windows of a split through the model.

    Args:
        model: in evaluation mode, whole, on its device.
        windows: the split's samples.
        byte_lengths: bytes that each token id stands for, [V].
        batch_size: windows that go through the model at once.
        num_samples: how many windows, at least 1.
        advance: told the number of finished tokens.
    """
    device = next(model.parameters()).device
    by_position = torch.zeros(windows.seq_length, dtype=torch.float64)
    label_counts = np.zeros(len(byte_lengths), dtype=np.int64)
    firsts = range(0, num_samples, batch_size)

    def forward(_chunk: int, number: int, _received: Tensor | None) -> Tensor:
        rows = np.arange(firsts[number], min(firsts[number] + batch_size, num_samples))
        batch = micro_batch(windows.windows(rows), np.ones(len(rows), dtype=bool))
        nonlocal label_counts
        label_counts += np.bincount(
            batch.labels_SB.numpy().reshape(-1), minlength=len(byte_lengths)
        )
        losses_SB = token_losses(model, batch.to(device)).double()
        by_position.add_(losses_SB.sum(1).cpu())
        advance(batch.num_tokens)
        return losses_SB.sum()

    run_plan(forward_only(len(firsts)), forward)
    tokens = num_samples * windows.seq_length
    return HeldOutLoss(
        tokens=tokens,
        text_bytes=int((label_counts * byte_lengths).sum()),
        loss=float(by_position.sum()) / tokens,
        unigram_entropy=entropy(label_counts),
        loss_by_position=by_position.numpy() / num_samples,
    )
