"""Self attention: project, turn, attend, project back.

Shape legend: S sequence, B batch, H hidden, N query heads, G key/value heads, D head dimension;
head counts are this rank's.
"""

from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.layers.norm import RMSNorm
from lib.layers.rotary import apply_rotary
from lib.parallel.groups import Group


class SelfAttention(nn.Module):
    """Causal self attention with grouped key/value heads, [S, B, H] to [S, B, H]."""

    def __init__(self, config: ModelConfig, group: Group, core: CoreAttention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.core = core
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_query_groups * config.head_dim
        sizes = {"q": query_size, "k": key_size, "v": key_size}
        hidden = config.hidden_size
        self.linear_qkv = ColumnParallelLinear(hidden, sizes, group, bias=config.qkv_bias)
        self.linear_proj = RowParallelLinear(query_size, hidden, group, bias=config.bias)
        if config.qk_norm:
            size, epsilon = config.head_dim, config.norm_epsilon
            self.q_layernorm = RMSNorm(size, epsilon, group, input_is_cut=True)
            self.k_layernorm = RMSNorm(size, epsilon, group, input_is_cut=True)
        else:
            self.q_layernorm = self.k_layernorm = None

    def forward(self, x_SBH: Tensor, rotary: Tensor | None) -> Tensor:
        """Attends within each sequence of the batch.

        Args:
            x_SBH: hidden states, already normalised.
            rotary: table of ``rotary_table``, or None for learned positions.
        """
        q, k, v = self.linear_qkv(x_SBH)
        q_SBND = q.unflatten(-1, (-1, self.head_dim))
        k_SBGD = k.unflatten(-1, (-1, self.head_dim))
        v_SBGD = v.unflatten(-1, (-1, self.head_dim))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_SBND, k_SBGD = self.q_layernorm(q_SBND), self.k_layernorm(k_SBGD)
        if rotary is not None:
            q_SBND, k_SBGD = apply_rotary(q_SBND, rotary), apply_rotary(k_SBGD, rotary)
        dropout = self.dropout if self.training else 0.0
        return self.linear_proj(self.core(q_SBND, k_SBGD, v_SBGD, dropout))
