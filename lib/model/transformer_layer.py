"""One pre-norm transformer layer.

x = x + dropout(attention(norm(x)))
x = x + dropout(mlp(norm(x)))
"""

from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.documents import DocumentLayout
from lib.layers.dropout import Dropout
from lib.layers.norm import build_norm
from lib.layers.rotary import Rotary
from lib.model.attention import SelfAttention
from lib.model.mlp import MLP
from lib.parallel.groups import ParallelGroups


class TransformerLayer(nn.Module):
    """[S, B, H] to [S, B, H]."""

    def __init__(
        self,
        config: ModelConfig,
        groups: ParallelGroups,
        core: CoreAttention,
        rotary: Rotary | None,
    ) -> None:
        super().__init__()
        kind, size, epsilon = config.normalization, config.hidden_size, config.norm_epsilon
        self.dropout = Dropout.of_hidden(config.hidden_dropout, groups)
        self.input_layernorm = build_norm(kind, size, epsilon, groups)
        self.self_attention = SelfAttention(config, groups, core, rotary)
        self.pre_mlp_layernorm = build_norm(kind, size, epsilon, groups)
        self.mlp = MLP(config, groups)

    def forward(self, x_SBH: Tensor, layout: DocumentLayout | None) -> Tensor:
        """Adds attention and feed-forward to the residual stream."""
        x_SBH = x_SBH + self.dropout(self.self_attention(self.input_layernorm(x_SBH), layout))
        return x_SBH + self.dropout(self.mlp(self.pre_mlp_layernorm(x_SBH)))
