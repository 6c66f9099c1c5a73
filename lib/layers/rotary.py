"""Rotary position embedding, rotate-half form (as Megatron and Llama in Hugging Face).

Dimension i of the first half and i of the second half form a pair that is turned by the angle

    position * theta^(-2 i / D),  0 <= i < D/2

so that the product of a query and a key depends on their distance alone (Su et al., RoFormer).
Shape legend: S sequence, B batch, N query heads, G key heads, D head dimension.
"""

import torch
from torch import Tensor


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of all angles, fp32 [2, S, 1, 1, D]."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequency = theta**-exponent
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin()))[:, :, None, None, :]


def apply_rotary(x_SBND: Tensor, table: Tensor) -> Tensor:
    """Turns every head of [S, B, N, D] by its position's angles; keeps the dtype.

    Args:
        x_SBND: queries or keys.
        table: cosines and sines, [2, S, 1, 1, D], or [2, S, B, 1, D] if sequences differ.
    """
    cos, sin = table.to(x_SBND.dtype)
    first, second = x_SBND.chunk(2, dim=-1)
    return x_SBND * cos + torch.cat((-second, first), dim=-1) * sin


class Rotary:
    """Turns queries and keys; keeps the table of each dtype and device, which no layout changes.

    Args:
        head_dim: D, even.
        theta: base of the wavelengths.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(
        self, q_SBND: Tensor, k_SBGD: Tensor, positions_SB: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Turns both; S is their whole sequence, also when it is cut elsewhere.

        Args:
            q_SBND: queries.
            k_SBGD: keys of the same positions.
            positions_SB: int64 [S, B], less than S; None: from 0 on in each sequence.
        """
        table = self._table(q_SBND)
        if positions_SB is not None:
            table = table[:, positions_SB, 0]
        return apply_rotary(q_SBND, table), apply_rotary(k_SBGD, table)

    def _table(self, x_SBND: Tensor) -> Tensor:
        length, key = x_SBND.shape[0], (x_SBND.dtype, x_SBND.device)
        table = self._tables.get(key)
        if table is None or table.shape[1] < length:
            # A table made in inference mode could not serve a later backward.
            with torch.inference_mode(mode=False), torch.no_grad():
                angles = rotary_table(length, self.head_dim, self.theta, x_SBND.device)
                table = self._tables[key] = angles.to(x_SBND.dtype)
        return table[:, :length]  # a longer table begins like a shorter one
