"""What the forward pass keeps for the backward pass, and what backward needs beside it, in bytes.

With the fused kernels and an attention that forms no S x S weights, a layer keeps, of each token
(H hidden, q = N D, k = G D, F feed-forward width, all of one rank; e bytes a number):

| kept by | what | bytes |
|---|---|---|
| first norm | the stream, and fp32 statistics of its rows (RMSNorm 1, LayerNorm 2) | e H + 4 or 8 |
| projection of q, k, v | its normalised input | e H |
| attention | q, k, v where they were written, output, fp32 log-sum-exp | e (2 q + 2 k) + 4 N |
| projection back | nothing: its input is attention's output | |
| second norm | as the first | e H + 4 or 8 |
| projection up | its input | e H |
| activation | its input: gate and up, or up | e (2 or 1) F |
| projection down | its input | e F |

The branch that a layer hands on is added to the stream by the next norm and not kept. Under
sequence parallelism the rows of H (not of q, k, F) are a rank's part of the sequence. Dropout keeps
a byte for each number. Norms of heads keep normalised queries and keys and 4 bytes a head.
"""

from dataclasses import dataclass
from functools import cached_property

from lib.plan.work import Work

_ROW = 4  # bytes of a statistic


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and micro batch on one rank."""

    work: Work

    @cached_property
    def hidden(self) -> int:
        """Hidden states as they lie between layers."""
        return self.work.element_bytes * self.work.own_tokens * self.work.model.hidden_size

    @cached_property
    def whole_hidden(self) -> int:
        """Hidden states of the whole sequence."""
        return self.work.element_bytes * self.work.tokens * self.work.model.hidden_size

    @cached_property
    def queries(self) -> int:
        """Queries, or the output of attention."""
        return self._of_all(self._heads * self.work.model.head_dim)

    @cached_property
    def keys(self) -> int:
        """Keys, or values."""
        return self._of_all(self._groups * self.work.model.head_dim)

    @cached_property
    def qkv(self) -> int:
        """Queries, keys and values."""
        return self.queries + 2 * self.keys

    @cached_property
    def wide(self) -> int:
        """One tensor of the feed-forward width."""
        return self._of_all(self.work.model.ffn_hidden_size // self.work.parallel.tensor)

    @cached_property
    def gates(self) -> int:
        """Input of the activation."""
        return self.wide * (2 if self.work.model.activation == "swiglu" else 1)

    @cached_property
    def norm(self) -> int:
        """Kept about a norm of hidden states: the stream, statistics and the next layer's input."""
        statistics = 2 if self.work.model.normalization == "layernorm" else 1
        return 2 * self.hidden + _ROW * statistics * self.work.own_tokens

    @cached_property
    def mlp(self) -> int:
        """Kept from the second norm on."""
        return self.norm + self.gates + self.wide + self.hidden_mask

    @cached_property
    def core(self) -> int:
        """Kept by attention's core alone, which recomputation of it saves."""
        work, model = self.work, self.work.model
        forms_weights = work.runtime.attention in ("fused_softmax", "reference")
        kept = _ROW * work.tokens * self._heads
        if forms_weights:
            each = work.element_bytes
            weights = work.micro_batch_size * self._heads * work.seq_length**2
            kept = weights * (2 * each + 1 if model.attention_dropout else each)
        elif work.within_documents:
            # Documents go through one row of tokens, and the output is copied back.
            kept += self.queries
        elif work.runtime.attention == "efficient" and self._groups < self._heads:
            kept += 2 * self.queries  # keys and values, repeated
        if model.qk_norm and (forms_weights or work.within_documents):
            kept += self.keys  # values are copied, but the norms need what lies beside them
        return kept

    @cached_property
    def attention(self) -> int:
        """Kept up to the second norm; the core apart."""
        kept = self.norm + self.qkv + self.queries + self.hidden_mask
        if self.work.model.qk_norm:
            kept += self.queries + self.keys
            kept += _ROW * self.work.tokens * (self._heads + self._groups)
        return kept

    @cached_property
    def kept(self) -> int:
        """All that a layer keeps that is not computed again."""
        return self.attention + self.core + self.mlp

    @cached_property
    def hidden_mask(self) -> int:
        """What dropout of hidden states keeps."""
        model = self.work.model
        return self.work.own_tokens * model.hidden_size if model.hidden_dropout else 0

    @cached_property
    def backward_extra(self) -> int:
        """The most that a layer's backward needs beside what it kept, at once.

        Each moment has the gradient of the stream, and less and less of what was kept:

        projection down: the gradient of its input (and the whole of its output's, gathered)
        projection up:   the gradient of its input (and the whole of its input, gathered, and the
                         part of the sum); the projection down has let its input go
        attention:       gradients of output, q, k, v, and fp32 sums for q; the MLP is done
        """
        gathered = self.whole_hidden if self.work.parallel.sequence else 0
        down = self.wide + gathered
        up = self.whole_hidden - self.wide + (gathered and gathered + self.hidden)
        sums = _ROW * self.queries // self.work.element_bytes
        core = self.core if self.work.runtime.recompute == "selective" else 0
        attention = self.queries + self.qkv + sums + core - self.mlp
        return self.hidden + max(down, up, attention)

    @property
    def _heads(self) -> int:
        return self.work.model.num_attention_heads // self.work.parallel.tensor

    @property
    def _groups(self) -> int:
        return max(1, self.work.model.num_query_groups // self.work.parallel.tensor)

    def _of_all(self, columns: int) -> int:
        return self.work.element_bytes * self.work.tokens * columns


def chunk_kept(layer: LayerActivations, layers: int) -> int:
    """What a chunk of so many layers keeps of a micro batch until its backward."""
    runtime = layer.work.runtime
    if runtime.recompute == "selective":
        return layers * (layer.kept - layer.core)
    if runtime.recompute == "none":
        return layers * layer.kept
    if runtime.recompute_method == "uniform":
        return -(-layers // runtime.recompute_layers) * layer.hidden
    again = min(layers, runtime.recompute_layers)
    return again * layer.hidden + (layers - again) * layer.kept


def chunk_backward(layer: LayerActivations, layers: int) -> int:
    """The most that a chunk's backward needs at once beside ``chunk_kept``."""
    runtime = layer.work.runtime
    if runtime.recompute != "full":
        return layer.backward_extra
    uniform = runtime.recompute_method == "uniform"
    group = min(runtime.recompute_layers, layers) if uniform else 1
    # The first stream of a group is the input that was kept.
    again = group * layer.kept - layer.hidden + layer.backward_extra
    kept_whole = 0 if uniform else max(0, layers - runtime.recompute_layers)
    return max(layer.backward_extra, again - kept_whole * layer.kept) if kept_whole else again


def head_kept(work: Work) -> tuple[int, int]:
    """About the final norm, and about the logits, of a micro batch: bytes kept.

    The logits are of the compute type, and their gradient comes to lie in their place. Of each row
    the maximum and a factor, fp32.
    """
    layer = LayerActivations(work)
    rows = 2 * _ROW * work.tokens
    return layer.norm, logits_bytes(work) + rows


def logits_bytes(work: Work) -> int:
    """This rank's slice of the logits of a micro batch."""
    return work.element_bytes * work.tokens * (work.vocab_size // work.parallel.tensor)


def head_extra(work: Work) -> int:
    """The most that the head needs at once beside what it keeps.

    In backward the gradient of its input, under sequence parallelism the whole input as well,
    gathered, and the part of the sum that this rank keeps. In forward the last layer's outputs are
    still there: the branch, and the stream where no layer keeps it.
    """
    layer = LayerActivations(work)
    if work.parallel.sequence:
        return 2 * layer.whole_hidden + layer.hidden
    outputs = 2 if work.runtime.recompute == "full" else 1
    return max(layer.whole_hidden, outputs * layer.hidden)
