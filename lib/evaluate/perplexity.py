"""Loss of a model on held-out text, in units that can be compared.

    loss            nats per token; depends on the tokenizer
    perplexity      exp(loss); likewise
    bits per byte   total nats / ln 2 / bytes of text predicted; comparable across tokenizers

Special tokens (the end of a document) count as tokens, unless the model was trained without them
(``data.eod_in_loss``), but stand for no bytes. The split is read in the windows that training reads
(lib/data/samples.py): each label of a window is predicted once, from at least one token and at most
``seq_length`` tokens of context. What is left of the split after its last whole window, fewer than
``seq_length`` labels, is not measured.

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
from lib.model.loss import SampleRules, micro_batch, token_losses
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import forward_only


@dataclass(frozen=True)
class HeldOutLoss:
    """What was measured on a set of samples; two sets of one length add up.

    Attributes:
        loss_sums: summed loss at each position of the window, fp64 [S].
        counts: counted labels at each position, int64 [S].
        label_counts: how often each token id was a counted label, int64 [V].
        text_bytes: bytes of text that the counted labels stand for.
    """

    loss_sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    label_counts: npt.NDArray[np.int64]
    text_bytes: int

    def __add__(self, other: "HeldOutLoss") -> "HeldOutLoss":
        """Both sets together, per token."""
        return HeldOutLoss(
            self.loss_sums + other.loss_sums,
            self.counts + other.counts,
            self.label_counts + other.label_counts,
            self.text_bytes + other.text_bytes,
        )

    @property
    def tokens(self) -> int:
        """Labels that were predicted and count."""
        return int(self.counts.sum())

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return float(self.loss_sums.sum()) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), with Megatron's cap of exp(20)."""
        return math.exp(min(20.0, self.loss))

    @property
    def bits_per_byte(self) -> float:
        """Bits needed per byte of text."""
        return float(self.loss_sums.sum()) / math.log(2) / self.text_bytes

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the labels' frequencies, in nats per token."""
        return entropy(self.label_counts)


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of a distribution given by counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Measuring:
    """How a set is measured.

    Attributes:
        batch_size: windows that go through the model at once.
        num_samples: how many windows of the set.
        rules: which labels count and what a token sees, as in training.
    """

    batch_size: int
    num_samples: int
    rules: SampleRules


def measure_loss(
    model: GPTModel,
    windows: SampleWindows,
    byte_lengths: npt.NDArray[np.int32],
    how: Measuring,
    advance: Callable[[int], None],
) -> HeldOutLoss:
    """Runs the first windows of a split through the model.

    Args:
        model: in evaluation mode, whole, on its device.
        windows: the split's samples.
        byte_lengths: bytes that each token id stands for, [V].
        how: how many windows, at least 1, and by which rules.
        advance: told the number of finished samples.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(windows.seq_length, dtype=torch.float64)
    counts = np.zeros(windows.seq_length, dtype=np.int64)
    label_counts = np.zeros(len(byte_lengths), dtype=np.int64)
    firsts = range(0, how.num_samples, how.batch_size)

    def forward(_chunk: int, number: int, _received: Tensor | None) -> Tensor:
        rows = np.arange(firsts[number], min(firsts[number] + how.batch_size, how.num_samples))
        starts = [windows.starts(row) for row in rows.tolist()] if how.rules.need_starts else None
        counted = np.ones(len(rows), dtype=bool)
        batch = micro_batch(windows.windows(rows), counted, how.rules, starts)
        weights_SB = batch.weights_SB.numpy() > 0
        labels = batch.labels_SB.numpy()[weights_SB]
        nonlocal counts, label_counts
        counts += weights_SB.sum(1)
        label_counts += np.bincount(labels, minlength=len(byte_lengths))
        losses_SB = token_losses(model, batch.to(device)).double()
        sums.add_(losses_SB.sum(1).cpu())
        advance(len(rows))
        return losses_SB.sum()

    run_plan(forward_only(len(firsts)), forward)
    text_bytes = int((label_counts * byte_lengths).sum())
    return HeldOutLoss(sums.numpy(), counts, label_counts, text_bytes)
