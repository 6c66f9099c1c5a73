"""Recomputation: keep less in the forward pass and compute it again in the backward pass.

| mode | what is computed again |
|---|---|
| none | nothing |
| selective | core attention, whose weights grow with the square of the sequence |
| full, uniform | every layer; the input of each group of ``layers`` layers is kept |
| full, block | the first ``layers`` layers of each chunk; the others keep everything |

The second computation draws the same random numbers as the first, so gradients have the same bits
in every mode. (The modes are Megatron's.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.layers.attention import CoreAttention
from lib.layers.documents import Documents
from lib.model.attention import Sequences
from lib.model.transformer_layer import Hidden
from lib.parallel.random import RandomStream

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Recompute:
    """What is computed again in the backward pass.

    Attributes:
        mode: ``none``, ``selective`` or ``full``.
        method: for full: ``uniform`` or ``block``.
        layers: for full: layers of a group (uniform) or of the block.
        stream: the stream beside the default one that dropout draws from, or None.
        draws: whether the forward pass draws random numbers at all.
    """

    mode: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1
    stream: RandomStream | None = None
    draws: bool = False


def recomputed_attention(core: CoreAttention, recompute: Recompute) -> CoreAttention:
    """The core attention, computed again in the backward pass if the mode is selective."""
    if recompute.mode != "selective":
        return core
    return partial(_checkpoint, core, recompute)


def run_layers(
    layers: Sequence[nn.Module],
    x_SBH: Tensor,
    sequences: Sequences,
    recompute: Recompute,
) -> Hidden:
    """Runs layers one after another.

    Args:
        layers: each maps a stream, a branch and the sequences to a stream and a branch.
        x_SBH: what the first one gets.
        sequences: what attention is told of them.
        recompute: what is computed again.

    Returns:
        The last layer's stream and branch; without layers the input, and None.
    """
    hidden: Hidden = x_SBH, None
    for group, again in _groups(layers, recompute):
        run = partial(_in_turn, group, sequences)
        # One tensor is kept of each group that is computed again, so the pair becomes one.
        hidden = _checkpoint(run, recompute, joined(hidden), None) if again else run(*hidden)
    return hidden


def joined(hidden: Hidden) -> Tensor:
    """The hidden states of a pair as one tensor."""
    stream_SBH, branch_SBH = hidden
    return stream_SBH if branch_SBH is None else stream_SBH + branch_SBH


def _groups(
    layers: Sequence[nn.Module], recompute: Recompute
) -> list[tuple[Sequence[nn.Module], bool]]:
    """Consecutive layers and whether they are computed again, together."""
    size = recompute.layers
    if recompute.mode != "full":
        return [(layers, False)]
    if recompute.method == "uniform":
        return [(layers[i : i + size], True) for i in range(0, len(layers), size)]
    return [*(((layer,), True) for layer in layers[:size]), (layers[size:], False)]


def _in_turn(
    layers: Sequence[nn.Module],
    sequences: Sequences,
    stream_SBH: Tensor,
    branch_SBH: Tensor | None,
) -> Hidden:
    for layer in layers:
        stream_SBH, branch_SBH = layer(stream_SBH, branch_SBH, sequences)
    return stream_SBH, branch_SBH


def _checkpoint(
    function: Callable[..., _Result],
    recompute: Recompute,
    *inputs: Tensor | float | Documents | None,
) -> _Result:
    # checkpoint() replays the default streams only; the other one is replayed here.
    return checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=recompute.draws,
        context_fn=partial(_replaying, recompute.stream if recompute.draws else None),
    )


def _replaying(
    stream: RandomStream | None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first and of the second computation."""
    return nullcontext(), nullcontext() if stream is None else stream.replayed(stream.state)
