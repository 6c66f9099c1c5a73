"""The feed-forward layer: widen, activate, narrow."""

from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.activation import gelu, swiglu
from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.parallel.groups import ParallelGroups


class MLP(nn.Module):
    """[S, B, H] to [S, B, H] through the feed-forward width, gated or not."""

    def __init__(self, config: ModelConfig, groups: ParallelGroups, *, fused: bool) -> None:
        super().__init__()
        self.is_gated = config.activation == "swiglu"
        self.fused = fused
        parts = ("gate", "up") if self.is_gated else ("up",)
        hidden, wide = config.hidden_size, config.ffn_hidden_size
        self.linear_fc1 = ColumnParallelLinear(
            hidden, dict.fromkeys(parts, (wide, 1)), groups, bias=config.bias
        )
        self.linear_fc2 = RowParallelLinear(wide, hidden, groups, bias=config.bias)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Applies the layer to every token on its own."""
        wide = self.linear_fc1(x_SBH)
        return self.linear_fc2(swiglu(wide, fused=self.fused) if self.is_gated else gelu(wide))
