"""Self attention: project, turn, attend, project back.

Shape legend: S sequence, B batch, H hidden, N query heads, G key/value heads, D head dimension;
head counts are this rank's.
"""

from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.documents import DocumentLayout
from lib.layers.dropout import Dropout
from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.layers.norm import RMSNorm
from lib.layers.rotary import Rotary
from lib.parallel.groups import ParallelGroups


class SelfAttention(nn.Module):
    """Causal self attention with grouped key/value heads, [S, B, H] to [S, B, H]."""

    def __init__(
        self,
        config: ModelConfig,
        groups: ParallelGroups,
        core: CoreAttention,
        rotary: Rotary | None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = Dropout.of_heads(config.attention_dropout, groups)
        self.core = core
        self.rotary = rotary
        heads, kv_heads, size = config.num_attention_heads, config.num_query_groups, config.head_dim
        parts = {"q": (heads, size), "k": (kv_heads, size), "v": (kv_heads, size)}
        hidden = config.hidden_size
        self.linear_qkv = ColumnParallelLinear(hidden, parts, groups, bias=config.qkv_bias)
        self.linear_proj = RowParallelLinear(heads * size, hidden, groups, bias=config.bias)
        self.q_layernorm = self.k_layernorm = None
        if config.qk_norm:
            self.q_layernorm = RMSNorm(size, config.norm_epsilon, groups, input_is_cut=True)
            self.k_layernorm = RMSNorm(size, config.norm_epsilon, groups, input_is_cut=True)

    def forward(self, x_SBH: Tensor, layout: DocumentLayout | None) -> Tensor:
        """Attends within each sequence of the batch, or within each document of its layout.

        Args:
            x_SBH: normalised already.
            layout: of the whole sequences, also where ``x_SBH`` is cut along them.
        """
        positions_SB, documents = None, None
        if layout is not None:
            positions_SB, documents = layout.positions_SB, layout.documents
        q, k, v = self.linear_qkv(x_SBH)
        q_SBND = q.unflatten(-1, (-1, self.head_dim))
        k_SBGD = k.unflatten(-1, (-1, self.head_dim))
        v_SBGD = v.unflatten(-1, (-1, self.head_dim))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_SBND, k_SBGD = self.q_layernorm(q_SBND), self.k_layernorm(k_SBGD)
        if self.rotary is not None:
            q_SBND, k_SBGD = self.rotary(q_SBND, k_SBGD, positions_SB)
        with self.dropout.drawing() as dropout:
            context_SBH = self.core(q_SBND, k_SBGD, v_SBGD, dropout, documents)
        return self.linear_proj(context_SBH)
