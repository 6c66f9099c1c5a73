"""The two passes over the logits of a vocabulary-parallel cross entropy.

A row is a token, and its columns are the part of the vocabulary that this rank holds. Columns from
``real`` on are padding: whatever stands there counts as minus infinity, and its gradient is zero.

| pass | reads | writes |
|---|---|---|
| row_statistics | the logits once | four numbers a row |
| write_gradient | the logits once | their gradient, over them |

Between the two, the ranks join their numbers and make the loss (``lib.layers.cross_entropy``). The
first pass keeps the maximum m and the sum s of exponentials of the columns seen so far (Milakov
and Gimelshein, online normalizer calculation for softmax); a block with a larger maximum m' turns
s into s exp(m - m'). The second pass computes, with four weights of the row,

    gradient_v = factor exp(logit_v - maximum) - label_weight [v is the label] - uniform_weight

so that the logits in their own number type are the only large tensor of forward and backward.

Shape legend: M rows, C columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

# 16 elements a thread: enough loads under way to keep the memory busy with several rows on each
# multiprocessor, few enough that three blocks of fp32 stay in registers.
_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit
def _logits(logits, column, columns, real) -> tl.tensor:
    """A block of a row in fp32; minus infinity beyond the real columns.

    Padding is read and thrown away: ``columns`` is a multiple of 16 in models, ``real`` is any
    number, and a mask that may end anywhere would have each thread load its elements one by one.
    """
    logit = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
    return tl.where(column < real, logit, float("-inf"))


@triton.jit
def _cross_entropy_statistics(
    logits,  # [M, C]
    labels,  # int64 [M]
    statistics,  # fp32 [4, M] out
    rows,
    columns,
    first,
    real,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # row * columns may pass 2^31
    logits += row * columns
    maximum = float("-inf")
    # One sum for each place of a block: only the maximum is reduced with every block, as each
    # exponential needs it. One exponential for each logit: these units are the next to run out.
    exponentials = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = _logits(logits, column, columns, real)
        larger = tl.maximum(maximum, tl.max(logit))
        # A maximum of minus infinity would give the difference of two infinities.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(maximum - shift) + tl.exp(logit - shift)
        plain += tl.where(column < real, logit, 0.0)
        maximum = larger
    label = tl.load(labels + row) - first
    mine = (label >= 0) & (label < columns)
    label_logit = tl.load(logits + label, mask=mine, other=0.0).to(tl.float32)
    statistics += row
    tl.store(statistics, maximum)
    tl.store(statistics + rows, tl.sum(exponentials))
    tl.store(statistics + 2 * rows, label_logit)
    tl.store(statistics + 3 * rows, tl.sum(plain))


@triton.jit
def _cross_entropy_gradient(
    logits,  # [M, C], becomes its gradient
    labels,  # int64 [M]
    weights,  # fp32 [4, M]
    rows,
    columns,
    first,
    real,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    weights += row
    maximum = tl.load(weights)
    factor = tl.load(weights + rows)
    label_weight = tl.load(weights + 2 * rows)
    uniform_weight = tl.load(weights + 3 * rows)
    label = tl.load(labels + row) - first
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = _logits(logits, column, columns, real)
        gradient = factor * tl.exp(logit - maximum) - uniform_weight
        gradient -= tl.where(column == label, label_weight, 0.0)
        gradient = tl.where(column < real, gradient, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


def row_statistics(logits_MC: Tensor, labels_M: Tensor, first: int, real: int) -> Tensor:
    """What a rank has to tell of its columns.

    Args:
        logits_MC: fp32, bf16 or fp16 [M, C], contiguous.
        labels_M: global token ids, int64 [M], contiguous.
        first: global id of column 0.
        real: columns that are no padding, from 0 to C.

    Returns:
        fp32 [4, M], over the real columns: the maximum, minus infinity if there is none; the sum of
        exp(logit - maximum); the logit of the label, 0 if the label is in no column; the sum of the
        logits.
    """
    rows, columns = logits_MC.shape
    assert logits_MC.is_contiguous()
    assert labels_M.is_contiguous()
    statistics = logits_MC.new_empty((4, rows), dtype=torch.float32)
    launch: Any = _cross_entropy_statistics[(rows,)]
    launch(
        logits_MC.detach(),
        labels_M,
        statistics,
        rows,
        columns,
        first,
        real,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return statistics


def write_gradient(
    logits_MC: Tensor, labels_M: Tensor, first: int, real: int, weights_4M: Tensor
) -> None:
    """Overwrites the logits with their gradient.

    Args:
        logits_MC: as of ``row_statistics``; an autograd graph that saved them notices the change.
        labels_M: as of ``row_statistics``.
        first: as of ``row_statistics``.
        real: as of ``row_statistics``.
        weights_4M: of each row what the module's formula takes: ``maximum`` (over all ranks),
            ``factor``, ``label_weight``, ``uniform_weight``; fp32 [4, M], contiguous.
    """
    rows, columns = logits_MC.shape
    assert logits_MC.is_contiguous()
    assert labels_M.is_contiguous()
    assert weights_4M.is_contiguous()
    launch: Any = _cross_entropy_gradient[(rows,)]
    launch(
        logits_MC.detach(),
        labels_M,
        weights_4M,
        rows,
        columns,
        first,
        real,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    increment_version(logits_MC)
