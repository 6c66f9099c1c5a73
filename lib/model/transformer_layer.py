"""One pre-norm transformer layer.

x = x + dropout(attention(norm(x)))
x = x + dropout(mlp(norm(x)))

Each sum is taken by the norm that follows it, which reads both anyway: between layers the hidden
states are a pair, the residual stream and the branch that is still to be added to it.
"""

from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.dropout import Dropout
from lib.layers.norm import build_norm
from lib.model.attention import SelfAttention, Sequences
from lib.model.mlp import MLP
from lib.parallel.groups import ParallelGroups

Hidden = tuple[Tensor, Tensor | None]


class TransformerLayer(nn.Module):
    """From a pair of [S, B, H] to such a pair."""

    def __init__(
        self,
        config: ModelConfig,
        groups: ParallelGroups,
        core: CoreAttention,
        *,
        fused: bool,
    ) -> None:
        super().__init__()
        kind, size, epsilon = config.normalization, config.hidden_size, config.norm_epsilon
        self.dropout = Dropout.of_hidden(config.hidden_dropout, groups)
        self.input_layernorm = build_norm(kind, size, epsilon, groups, fused=fused)
        self.self_attention = SelfAttention(config, groups, core, fused=fused)
        self.pre_mlp_layernorm = build_norm(kind, size, epsilon, groups, fused=fused)
        self.mlp = MLP(config, groups, fused=fused)

    def forward(
        self, stream_SBH: Tensor, branch_SBH: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Adds attention to the residual stream and leaves the feed-forward layer's branch."""
        stream_SBH, x_SBH = self.input_layernorm(stream_SBH, branch_SBH)
        branch_SBH = self.dropout(self.self_attention(x_SBH, sequences))
        stream_SBH, x_SBH = self.pre_mlp_layernorm(stream_SBH, branch_SBH)
        return stream_SBH, self.dropout(self.mlp(x_SBH))
