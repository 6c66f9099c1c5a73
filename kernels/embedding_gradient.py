"""The gradient of an embedding table: rows added to those of the table that were looked up.

    total[index[m]] += grad[m]        for each m with index[m] >= 0

Some tokens are frequent, in text up to a twentieth of all positions, and many of the table's rows
are not read at all. Only rows that occur are touched, and no sum is made by atomic additions: the
order of all sums is set by the indices alone, so that results have the same bits in every run.

Positions are sorted by index, those of equal index in their own order, and cut into tiles:

    sorted indices   2 2 5 7 | 7 7 7 7 | 7 9 9 9 |        tiles of 4
    into the table   2   5 7 |         |   9     |        by the tile in which a run begins
    left beside            - | 7       | 7       |        by the tiles that it goes on in

A run of equal indices begins in one tile, whose program alone adds to the table's row. A tile that
a run goes on in leaves its sum of it in a row of a buffer, and a second kernel, with a program for
each run that has such rows, adds up these, many at a time, and adds the result to the table.

All sums are in fp32. Shape legend: M positions, H columns, V rows of the table.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

# A program goes through the positions of a tile one after another: short tiles make enough
# programs to keep the memory busy, at the price of a larger buffer.
_TILE = 16
# Of bf16, one load of 16 bytes for each thread. A multiprocessor holds at most 32 programs, and
# two warps in each of those are all the warps that it can hold.
_BLOCK = 512
_WARPS = 2
# Rows of the buffer that are added up at a time: most runs have one or two, those of the most
# frequent tokens some ten in each thousand positions.
_GROUP = 16
_GROUP_BLOCK = 256
_GROUP_WARPS = 4


@triton.jit
def _embedding_gradient_tiles(
    total,  # fp32 [V, H], added to
    heads,  # fp32 [tiles, H] out, where a run goes on in a tile
    keys,  # int32 [M], ascending
    order,  # int64 [M], the position of each key
    grad,  # [M, H]
    positions,
    columns,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    start = tile * TILE
    count = tl.minimum(TILE, positions - start)
    previous = tl.load(keys + start - 1, mask=start > 0, other=-1)
    key = tl.load(keys + start)
    row = tl.load(order + start)
    gradient = tl.load(grad + row * columns + column, mask=inside & (key >= 0), other=0.0)
    run = tl.zeros([BLOCK], tl.float32)
    for offset in range(count):
        # The next row is on its way while this one's run is added to the table.
        after = start + offset + 1
        has_next = offset + 1 < count
        next_key = tl.load(keys + after, mask=has_next, other=-1)
        row = tl.load(order + after, mask=has_next, other=0)
        wanted = inside & (next_key >= 0)
        next_gradient = tl.load(grad + row * columns + column, mask=wanted, other=0.0)
        run += gradient.to(tl.float32)
        if (key != next_key) & (key >= 0):
            if key == previous:
                place = heads + tile.to(tl.int64) * columns + column
                tl.store(place, run, mask=inside)
            else:
                place = total + key.to(tl.int64) * columns + column
                tl.store(place, tl.load(place, mask=inside) + run, mask=inside)
            run = tl.zeros([BLOCK], tl.float32)
        key = next_key
        gradient = next_gradient


@triton.jit
def _embedding_gradient_heads(
    total,  # fp32 [V, H], added to
    heads,  # fp32 [tiles, H]
    keys,  # int32 [M], ascending
    tiles,
    columns,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(0) + 1  # no run goes on in the first one
    key = tl.load(keys + tile * TILE)
    goes_on = key == tl.load(keys + tile * TILE - 1)
    # The tile before is where the run began, unless it went on there too.
    earlier = tl.load(keys + (tile - 1) * TILE - 1, mask=tile > 1, other=-1)
    if goes_on & (key != earlier) & (key >= 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        run = tl.zeros([BLOCK], tl.float32)
        found = GROUP
        while found == GROUP:
            member = tile + tl.arange(0, GROUP)
            theirs = tl.load(keys + member * TILE, mask=member < tiles, other=-1)
            mine = theirs == key
            place = heads + member[:, None].to(tl.int64) * columns + column[None, :]
            run += tl.sum(tl.load(place, mask=mine[:, None] & inside[None, :], other=0.0), 0)
            found = tl.sum(mine.to(tl.int32), 0)
            tile += GROUP
        place = total + key.to(tl.int64) * columns + column
        tl.store(place, tl.load(place, mask=inside) + run, mask=inside)


def add_rows(total_VH: Tensor, index_M: Tensor, grad_MH: Tensor) -> None:
    """Adds each row of a gradient to a row of a table, in place.

    Args:
        total_VH: the table's gradient so far, fp32 [V, H], contiguous.
        index_M: the row of the table for each row of ``grad_MH``, int64 or int32 [M], below V;
            negative: none.
        grad_MH: fp32, bf16 or fp16 [M, H], contiguous.
    """
    positions, columns = grad_MH.shape
    assert index_M.shape == (positions,)
    assert total_VH.dtype == torch.float32
    assert total_VH.shape[1] == columns
    assert total_VH.is_contiguous()
    assert grad_MH.is_contiguous()
    if positions == 0:
        return
    # Half the bytes of int64, which sorting takes half the time for.
    keys, order = torch.sort(index_M.to(torch.int32), stable=True)
    tiles = -(-positions // _TILE)
    heads = total_VH.new_empty((tiles, columns))
    total = total_VH.detach()
    block = min(_BLOCK, triton.next_power_of_2(columns))
    launch: Any = _embedding_gradient_tiles[(tiles, triton.cdiv(columns, block))]
    launch(
        total,
        heads,
        keys,
        order,
        grad_MH.detach(),
        positions,
        columns,
        TILE=_TILE,
        BLOCK=block,
        num_warps=_WARPS,
    )
    if tiles > 1:
        block = min(_GROUP_BLOCK, block)
        launch_heads: Any = _embedding_gradient_heads[(tiles - 1, triton.cdiv(columns, block))]
        launch_heads(
            total,
            heads,
            keys,
            tiles,
            columns,
            TILE=_TILE,
            GROUP=_GROUP,
            BLOCK=block,
            num_warps=_GROUP_WARPS,
        )
    increment_version(total_VH)
