"""A stack of layers small enough to cut into any number of chunks, in float64.

A batch of numbers is embedded, goes through one residual layer per chunk and ends in a loss.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 5
SHAPE = (3, 2, HIDDEN)  # [S, B, H]


class Layer(nn.Module):
    """Gives a tuple, as a transformer layer does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_SBH):
        return (x_SBH + self.branch(x_SBH),)

    def branch(self, x_SBH):
        return torch.tanh(self.inner(x_SBH)) * 0.5


class Chunk(nn.Module):
    """The chunk of global number ``number`` of ``total``; its weights depend on the number only."""

    def __init__(self, number, total, recompute=False):
        super().__init__()
        torch.manual_seed(100 + number)
        self.embedding = nn.Embedding(7, HIDDEN) if number == 0 else None
        self.layer = Layer()
        self.recompute = recompute
        self.head = nn.Linear(HIDDEN, 1) if number == total - 1 else None
        self.double()

    def forward(self, tokens_SB, received):
        x_SBH = received if self.embedding is None else self.embedding(tokens_SB)
        if self.recompute:
            (x_SBH,) = checkpoint(self.layer, x_SBH, use_reentrant=False)
        else:
            (x_SBH,) = self.layer(x_SBH)
        return x_SBH if self.head is None else self.head(x_SBH).square().sum()


def batches(count, seed):
    """Micro batches of tokens, [S, B] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(7, SHAPE[:2], generator=generator) for _ in range(count)]


def losses_of(chunks, micro_batches):
    """The summed loss of each micro batch, in one process."""
    losses = []
    for tokens_SB in micro_batches:
        x = None
        for chunk in chunks:
            x = chunk(tokens_SB, x)
        losses.append(x)
    return losses


def gradients_of(chunk, number):
    """Gradients by name, with the chunk's global number in front."""
    return {f"{number}.{name}": value.grad for name, value in chunk.named_parameters()}
