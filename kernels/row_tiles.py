"""How kernels that need whole rows of a matrix [M, H] cut it into tiles.

A program holds a tile of whole rows in registers, reads it once, and reduces along each row with
no second pass. Long rows are one a tile; of short ones, such as attention heads, a tile takes
several, so that each thread still has a full load to wait for.

Backward also sums over the rows, for the gradients of weights. A few programs for each
multiprocessor go over many tiles each, add up in registers, and leave one row of sums each; the
sum of those rows is small work for torch, and its order is always the same, so results are too.
"""

from functools import cache
from typing import NamedTuple

import torch

# Of bf16, 2048 elements are one load of 16 bytes, the widest, for each thread of 8 warps.
_TILE_ELEMENTS = 2048
_SHORT_ROW_WARPS = 8
# Several tiles of a row's numbers must fit a thread's 255 registers: long rows get more threads.
_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 32
# Enough to hide memory latency, few enough that the rows of sums are cheap.
_PROGRAMS_PER_MULTIPROCESSOR = 4
_CPU_PROGRAMS = 4  # of the interpreter, which runs one after another


class RowTiles(NamedTuple):
    """A cut of [M, H] into tiles.

    Attributes:
        height: rows of a tile, a power of two.
        width: columns of a tile: H rounded up to a power of two.
        count: number of tiles; the last one may reach beyond M.
        warps: warps of the program that works on a tile.
    """

    height: int
    width: int
    count: int
    warps: int

    def programs(self, device: torch.device) -> int:
        """How many programs share the tiles when each goes over several."""
        return min(self.count, _programs_at_once(device))


def row_tiles(rows: int, columns: int) -> RowTiles:
    """The tiles of a matrix [rows, columns]."""
    width = 1 << (columns - 1).bit_length()
    height = max(1, _TILE_ELEMENTS // width)
    warps = min(_MAX_WARPS, max(_SHORT_ROW_WARPS, width // _ELEMENTS_PER_WARP))
    return RowTiles(height, width, -(-rows // height), warps)


@cache
def _programs_at_once(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    return _PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count
