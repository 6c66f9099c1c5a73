"""One pre-norm transformer layer.

x = x + dropout(attention(norm(x)))
x = x + dropout(mlp(norm(x)))
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.norm import build_norm
from lib.model.attention import SelfAttention
from lib.model.mlp import MLP
from lib.parallel.groups import Group


class TransformerLayer(nn.Module):
    """[S, B, H] to [S, B, H]."""

    def __init__(self, config: ModelConfig, group: Group, core: CoreAttention) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        kind, size, epsilon = config.normalization, config.hidden_size, config.norm_epsilon
        self.input_layernorm = build_norm(kind, size, epsilon, group)
        self.self_attention = SelfAttention(config, group, core)
        self.pre_mlp_layernorm = build_norm(kind, size, epsilon, group)
        self.mlp = MLP(config, group)

    def forward(self, x_SBH: Tensor, rotary: Tensor | None) -> Tensor:
        """Adds attention and feed-forward to the residual stream."""
        attended = self.self_attention(self.input_layernorm(x_SBH), rotary)
        x_SBH = x_SBH + F.dropout(attended, self.dropout, self.training)
        widened = self.mlp(self.pre_mlp_layernorm(x_SBH))
        return x_SBH + F.dropout(widened, self.dropout, self.training)
