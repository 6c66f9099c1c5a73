"""The decoder-only language model, or the part of it that one pipeline stage holds.

Layers sit in a ModuleDict keyed by their global number and absent ends are None, so a parameter
has the same name in every layout. Shape legend: S sequence, B batch, H hidden, V padded vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.cross_entropy import vocab_parallel_cross_entropy
from lib.layers.embedding import OutputLayer, PositionEmbedding, VocabParallelEmbedding
from lib.layers.norm import build_norm
from lib.layers.rotary import rotary_table
from lib.model.transformer_layer import TransformerLayer
from lib.parallel.groups import Group, ParallelGroups

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StageSlice:
    """Which part of the model a pipeline stage holds.

    Attributes:
        layers: global numbers of its layers.
        first: whether it holds the embeddings.
        last: whether it holds the final norm and the output projection.
    """

    layers: range
    first: bool
    last: bool


def whole_model(config: ModelConfig) -> StageSlice:
    """The slice of the only stage of an unpipelined model."""
    return StageSlice(range(config.num_layers), first=True, last=True)


class Embedding(nn.Module):
    """Token embeddings plus learned positions (none with rotary positions), then dropout."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, group: Group) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(padded_vocab_size, config.hidden_size, group)
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding == "learned":
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings, config.hidden_size, group
            )

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Maps int64 [S, B] to [S, B, H]."""
        x_SBH = self.word_embeddings(tokens_SB)
        if self.position_embeddings is not None:
            x_SBH = x_SBH + self.position_embeddings(tokens_SB.shape[0])
        return F.dropout(x_SBH, self.dropout, self.training)


class GPTModel(nn.Module):
    """One stage's part of the model.

    Args:
        config: the resolved ``model`` section.
        vocab_size: number of real token ids.
        padded_vocab_size: rows of the embedding table.
        groups: process groups of this rank.
        core: core attention, see ``lib.layers.attention``.
        part: the layers and ends to hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        groups: ParallelGroups,
        core: CoreAttention,
        part: StageSlice,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.group = groups.tp
        self.embedding = Embedding(config, padded_vocab_size, groups.tp) if part.first else None
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(config, groups.tp, core) for number in part.layers}
        )
        self.final_layernorm = self.output_layer = None
        if part.last:
            self.final_layernorm = build_norm(
                config.normalization, config.hidden_size, config.norm_epsilon, groups.tp
            )
            self.output_layer = OutputLayer(
                padded_vocab_size,
                config.hidden_size,
                groups.tp,
                own_weight=not config.tie_embeddings,
            )

    def forward(self, inputs: Tensor, labels_SB: Tensor | None = None) -> Tensor:
        """Runs this stage's part.

        Args:
            inputs: token ids, int64 [S, B], on the first stage; hidden states [S, B, H] on others.
            labels_SB: the next token of each position, int64 [S, B]; None to get logits.

        Returns:
            Hidden states [S, B, H] before the last stage; on it the loss of every token [S, B]
            in nats, fp32, or without labels this rank's slice of the logits [S, B, V / T].
        """
        x_SBH = inputs if self.embedding is None else self.embedding(inputs)
        rotary = self._rotary(x_SBH)
        for layer in self.layers.values():
            x_SBH = layer(x_SBH, rotary)
        if self.output_layer is None or self.final_layernorm is None:
            return x_SBH
        tied_weight = None if self.embedding is None else self.embedding.word_embeddings.weight
        logits_SBV = self.output_layer(self.final_layernorm(x_SBH), tied_weight)
        if labels_SB is None:
            return logits_SBV
        return vocab_parallel_cross_entropy(logits_SBV, labels_SB, self.vocab_size, self.group)

    def _rotary(self, x_SBH: Tensor) -> Tensor | None:
        if self.config.position_embedding != "rope":
            return None
        config = self.config
        return rotary_table(x_SBH.shape[0], config.head_dim, config.rope_theta, x_SBH.device)
