"""Rotary position embedding, rotate-half form (as Megatron and Llama in Hugging Face).

Dimension i of the first half and i of the second half form a pair that is turned by the angle

    position * theta^(-2 i / D),  0 <= i < D/2

so that the product of a query and a key depends on their distance alone (Su et al., RoFormer).
Tables are fp32; torch's form rounds them to the type of what it turns, the kernel does not.
Shape legend: S sequence, B batch, N query heads, G key and value heads, D head dimension,
O = (N + 2G) D outputs of the projection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lib.layers.fused import runs_kernels


@dataclass(frozen=True)
class HeadShape:
    """How the outputs of a fused projection are made up, on this rank.

    Attributes:
        num_heads: N.
        num_groups: G.
        head_dim: D.
    """

    num_heads: int
    num_groups: int
    head_dim: int


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of all angles, fp32 [2, S, D/2]."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequency = theta**-exponent
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x_SBND: Tensor, table: Tensor, *, fused: bool) -> Tensor:
    """Turns every head of [S, B, N, D] by its position's angles; keeps the dtype.

    Args:
        x_SBND: queries or keys.
        table: cosines and sines, fp32 [2, S, D/2], or [2, S, B, D/2] if sequences differ.
        fused: by the kernel, where it runs: in place, and whoever made ``x`` must not need its
            values in backward.
    """
    if fused and runs_kernels(x_SBND):
        from kernels.rotary import rotate as rotate_in_place

        return rotate_in_place(x_SBND, table)
    by_sequence = table if table.ndim == 4 else table.unsqueeze(2)
    cos, sin = by_sequence.unsqueeze(-2).to(x_SBND.dtype)
    first, second = x_SBND.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_heads(
    qkv_SBO: Tensor, table: Tensor | None, shape: HeadShape, *, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, B, N, D], keys and values [S, B, G, D] of a fused projection.

    Args:
        qkv_SBO: all heads of the queries, then of the keys, then of the values; contiguous.
        table: turns queries and keys as ``rotate`` does; None: they stay as they are.
        shape: of the heads.
        fused: by the kernel, where it runs: all three lie in the memory of ``qkv``, turned in
            place, and whoever made ``qkv`` must not need its values in backward.
    """
    heads, groups, size = shape.num_heads, shape.num_groups, shape.head_dim
    if fused and runs_kernels(qkv_SBO):
        from kernels.rotary import split_heads as split_in_place

        return split_in_place(qkv_SBO, table, heads, groups, size)
    q, k, v = qkv_SBO.unflatten(-1, (-1, size)).split((heads, groups, groups), dim=2)
    if table is not None:
        q, k = rotate(q, table, fused=False), rotate(k, table, fused=False)
    return q, k, v


class Rotary:
    """The angles of all positions; keeps one table for each device, which no layout changes.

    Args:
        head_dim: D, even.
        theta: base of the wavelengths.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._tables: dict[torch.device, Tensor] = {}

    def table(
        self, length: int, device: torch.device, positions_SB: Tensor | None = None
    ) -> Tensor:
        """What ``rotate`` and ``split_heads`` take.

        Args:
            length: S, the whole sequence, also when it is cut elsewhere.
            device: of the table.
            positions_SB: int64 [S, B], less than S; None: from 0 on in each sequence.

        Returns:
            fp32 [2, S, D/2], a part of the table that is kept; with positions a new [2, S, B, D/2].
        """
        table = self._tables.get(device)
        if table is None or table.shape[1] < length:
            # A table made in inference mode could not serve a later backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                table = rotary_table(length, self.head_dim, self.theta, device)
            self._tables[device] = table
        if positions_SB is not None:
            return table[:, positions_SB]
        return table[:, :length]  # a longer table begins like a shorter one
