"""Self attention: project, turn, attend, project back.

Shape legend: S sequence, B batch, H hidden, N query heads, G key/value heads, D head dimension;
head counts are this rank's.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.documents import Documents
from lib.layers.dropout import Dropout
from lib.layers.linear import ColumnParallelLinear, RowParallelLinear
from lib.layers.norm import HeadNorm
from lib.layers.rotary import HeadShape, rotate, split_heads
from lib.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Sequences:
    """What every layer's attention is told of the sequences of a micro batch.

    Attributes:
        table: turns queries and keys by their positions, see ``lib.layers.rotary``; None: nothing
            does.
        documents: within which tokens attend; None: within each sequence.
    """

    table: Tensor | None = None
    documents: Documents | None = None


class SelfAttention(nn.Module):
    """Causal self attention with grouped key/value heads, [S, B, H] to [S, B, H]."""

    def __init__(
        self, config: ModelConfig, groups: ParallelGroups, core: CoreAttention, *, fused: bool
    ) -> None:
        super().__init__()
        self.fused = fused
        self.dropout = Dropout.of_heads(config.attention_dropout, groups)
        self.core = core
        heads, kv_heads, size = config.num_attention_heads, config.num_query_groups, config.head_dim
        parts = {"q": (heads, size), "k": (kv_heads, size), "v": (kv_heads, size)}
        ranks = groups.tp.size
        self.shape = HeadShape(heads // ranks, max(1, kv_heads // ranks), size)
        hidden = config.hidden_size
        self.linear_qkv = ColumnParallelLinear(hidden, parts, groups, bias=config.qkv_bias)
        self.linear_proj = RowParallelLinear(heads * size, hidden, groups, bias=config.bias)
        self.q_layernorm = self.k_layernorm = None
        if config.qk_norm:
            self.q_layernorm = HeadNorm(size, config.norm_epsilon, groups, fused=fused)
            self.k_layernorm = HeadNorm(size, config.norm_epsilon, groups, fused=fused)

    def forward(self, x_SBH: Tensor, sequences: Sequences) -> Tensor:
        """Attends within each sequence, or within each of its documents.

        Args:
            x_SBH: normalised already.
            sequences: the whole ones, also where ``x_SBH`` is cut along them.
        """
        qkv_SBO = self.linear_qkv(x_SBH)
        q_SBND, k_SBGD, v_SBGD = self._heads(qkv_SBO, sequences.table)
        with self.dropout.drawing() as dropout:
            context_SBH = self.core(q_SBND, k_SBGD, v_SBGD, dropout, sequences.documents)
        return self.linear_proj(context_SBH)

    def _heads(self, qkv_SBO: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; the table turns queries and keys, normalised before."""
        if self.q_layernorm is None or self.k_layernorm is None:
            return split_heads(qkv_SBO, table, self.shape, fused=self.fused)
        q_SBND, k_SBGD, v_SBGD = split_heads(qkv_SBO, None, self.shape, fused=self.fused)
        q_SBND, k_SBGD = self.q_layernorm(q_SBND), self.k_layernorm(k_SBGD)
        if table is not None:
            q_SBND = rotate(q_SBND, table, fused=self.fused)
            k_SBGD = rotate(k_SBGD, table, fused=self.fused)
        return q_SBND, k_SBGD, v_SBGD
