"""Rotary position embedding, rotate-half form (as Megatron and Llama in Hugging Face).

Dimension i of the first half and i of the second half form a pair that is turned by the angle

    position * theta^(-2 i / D),  0 <= i < D/2

so that the product of a query and a key depends on their distance alone (Su et al., RoFormer).
Shape legend: S sequence, B batch, N heads, D head dimension.
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
    """Turns every head of [S, B, N, D] by its position's angles; keeps the dtype."""
    cos, sin = table.to(x_SBND.dtype)
    first, second = x_SBND.chunk(2, dim=-1)
    return x_SBND * cos + torch.cat((-second, first), dim=-1) * sin
