"""The decoder-only language model, or the part of it that one chunk of a pipeline holds.

Layers sit in a ModuleDict keyed by their global number and absent ends are None, so a parameter
has the same name in every layout. Shape legend: S sequence, B batch, H hidden, V padded vocabulary,
T tensor-parallel degree; under sequence parallelism the hidden states between layers are
[S / T, B, H].
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lib.config.schema import ModelConfig
from lib.layers.attention import CoreAttention
from lib.layers.cross_entropy import vocab_parallel_cross_entropy
from lib.layers.documents import DocumentLayout
from lib.layers.dropout import Dropout
from lib.layers.embedding import OutputLayer, PositionEmbedding, VocabParallelEmbedding
from lib.layers.norm import build_norm
from lib.layers.rotary import Rotary
from lib.model.attention import Sequences
from lib.model.recompute import Recompute, joined, recomputed_attention, run_layers
from lib.model.transformer_layer import TransformerLayer
from lib.parallel.data_parallel import Unit
from lib.parallel.groups import ParallelGroups

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class StageSlice:
    """Which part of the model a chunk of a pipeline stage holds.

    Attributes:
        layers: global numbers of its layers.
        first: whether it holds the embeddings.
        last: whether it holds the final norm and the output projection.
    """

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class LossTerms:
    """What training adds to the plain cross entropy; measurements never do.

    Attributes:
        label_smoothing: share of the target given evenly to all tokens.
        z_loss: weight of log(sum of exp of the logits)^2.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class ModelOptions:
    """How a model computes; nothing of it changes its parameters.

    Attributes:
        core: core attention, see ``lib.layers.attention``.
        recompute: what the backward pass computes again.
        loss_terms: what training adds to the cross entropy.
        fused: whether to use the fused kernels where they can run (``lib.layers.fused``).
    """

    core: CoreAttention
    recompute: Recompute = field(default_factory=Recompute)
    loss_terms: LossTerms = field(default_factory=LossTerms)
    fused: bool = True


def whole_model(config: ModelConfig) -> StageSlice:
    """The slice of the only stage of an unpipelined model."""
    return StageSlice(range(config.num_layers), first=True, last=True)


class Embedding(nn.Module):
    """Token embeddings plus learned positions (none with rotary positions), then dropout."""

    def __init__(
        self,
        config: ModelConfig,
        padded_vocab_size: int,
        groups: ParallelGroups,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, hidden, groups, fused=fused
        )
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding == "learned":
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings, hidden, groups
            )
        self.dropout = Dropout.of_hidden(config.hidden_dropout, groups)

    def forward(self, tokens_SB: Tensor, positions_SB: Tensor | None) -> Tensor:
        """Maps int64 [S, B] to [S, B, H]; positions are those of the window unless given."""
        x_SBH = self.word_embeddings(tokens_SB)
        if self.position_embeddings is not None:
            x_SBH = x_SBH + self.position_embeddings(tokens_SB.shape[0], positions_SB)
        return self.dropout(x_SBH)


class GPTModel(nn.Module):
    """One chunk's part of the model.

    Args:
        config: the resolved ``model`` section.
        vocab_size: number of real token ids.
        padded_vocab_size: rows of the embedding table.
        groups: process groups of this rank.
        part: the layers and ends to hold.
        options: how it computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        groups: ParallelGroups,
        part: StageSlice,
        options: ModelOptions,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.groups = groups
        self.part = part
        self.recompute = options.recompute
        self.loss_terms = options.loss_terms
        self.fused = options.fused
        self.embedding: Embedding | None = None
        if part.first:
            self.embedding = Embedding(config, padded_vocab_size, groups, fused=options.fused)
        self.rotary: Rotary | None = None
        if config.position_embedding == "rope":
            self.rotary = Rotary(config.head_dim, config.rope_theta)
        core = recomputed_attention(options.core, options.recompute)
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(config, groups, core, fused=options.fused)
                for number in part.layers
            }
        )
        self.final_layernorm = self.output_layer = None
        # A chunk that holds both ends shares one tied table; the last of several has a copy.
        self.has_tied_copy = part.last and not part.first and config.tie_embeddings
        if part.last:
            self.final_layernorm = build_norm(
                config.normalization,
                config.hidden_size,
                config.norm_epsilon,
                groups,
                fused=options.fused,
            )
            self.output_layer = OutputLayer(
                padded_vocab_size,
                config.hidden_size,
                groups,
                own_weight=self.has_tied_copy or not config.tie_embeddings,
            )

    def global_name(self, name: str) -> str:
        """A parameter's name in the whole model: a copy of the tied table has the table's."""
        return WORD_EMBEDDINGS if self.has_tied_copy and name == _OUTPUT else name

    def units(self) -> list[Unit]:
        """What data parallelism gathers and reduces together, in the order of the forward pass.

        The ends last: a tied table serves both.
        """
        layers = [Unit((layer,), lasts=False) for layer in self.layers.values()]
        first = [] if self.embedding is None else [Unit((self.embedding,), lasts=True)]
        if self.final_layernorm is None or self.output_layer is None:
            return first + layers
        return [*first, *layers, Unit((self.final_layernorm, self.output_layer), lasts=True)]

    def forward(
        self,
        inputs: Tensor,
        labels_SB: Tensor | None = None,
        layout: DocumentLayout | None = None,
    ) -> Tensor:
        """Runs this chunk's part.

        Args:
            inputs: token ids, int64 [S, B], for the first chunk; hidden states [S, B, H] for
                others.
            labels_SB: the next token of each position, int64 [S, B]; None to get logits.
            layout: where documents lie in the sequences, the same for every chunk; None: each
                sequence is one.

        Returns:
            Hidden states [S, B, H] before the last chunk; of it the loss of every token [S, B]
            in nats, fp32 or wider, or without labels this rank's slice of the logits
            [S, B, V / T].
        """
        positions_SB = None if layout is None else layout.positions_SB
        x_SBH = inputs if self.embedding is None else self.embedding(inputs, positions_SB)
        sequences = self._sequences(x_SBH, layout)
        hidden = run_layers(list(self.layers.values()), x_SBH, sequences, self.recompute)
        if self.output_layer is None or self.final_layernorm is None:
            return joined(hidden)
        tied_weight = None if self.embedding is None else self.embedding.word_embeddings.weight
        _, x_SBH = self.final_layernorm(*hidden)
        logits_SBV = self.output_layer(x_SBH, tied_weight)
        if labels_SB is None:
            return logits_SBV
        terms = self.loss_terms if self.training else LossTerms()
        return vocab_parallel_cross_entropy(
            logits_SBV,
            labels_SB,
            self.vocab_size,
            self.groups.tp,
            label_smoothing=terms.label_smoothing,
            z_loss=terms.z_loss,
            fused=self.fused,
        )

    def _sequences(self, x_SBH: Tensor, layout: DocumentLayout | None) -> Sequences:
        """What attention is told; the table of a micro batch is made once for all layers."""
        layout = DocumentLayout() if layout is None else layout
        if self.rotary is None:
            return Sequences(None, layout.documents)
        cut = self.groups.tp.size if self.groups.sequence_parallel else 1
        length = x_SBH.shape[0] * cut
        table = self.rotary.table(length, x_SBH.device, layout.positions_SB)
        return Sequences(table, layout.documents)
