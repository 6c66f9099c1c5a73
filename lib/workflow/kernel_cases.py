"""The fused operations of ``kernels`` at a model's sizes, each in all the ways to compute it.

``drydock`` is the kernel and ``torch`` what ``runtime.kernels: torch`` runs instead, both by way of
``lib.layers``. ``compiled`` is for torch.compile: the same torch form, but for the cross entropy,
whose torch form is a loop over rows for the sake of memory; it compiles the formula. ``Liger`` is
the optional package liger-kernel; its ways get separate tensors where ours cuts a fused one, so
that it has nothing to copy.

Bytes are what no implementation of the same contract can do without: inputs read once, outputs
written once, of saved tensors those that the gradient's formula needs; e bytes an element:

| operation | forward | backward |
|---|---|---|
| rms_norm, layer_norm, with residual sum | 4 M H e | 4 M H e |
| swiglu | 3 M F e | 5 M F e |
| rotary, in place | 2 M (N + G) D e | 2 M (N + 2G) D e |
| cross_entropy, gradient in place | M V e | 2 M V e |
| softmax, in place, of P pairs that see each other | B N (P + S^2) e | 3 B N P e |
| embedding_gradient, of U different tokens | | M H e + 8 U H |

and small ones: weights, labels, tables. Shape legend: S sequence, B batch, M = S B, H hidden,
N heads, G key and value heads, D head dimension, F width of the MLP, V padded vocabulary.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lib.layers.activation import swiglu
from lib.layers.cross_entropy import vocab_parallel_cross_entropy
from lib.layers.embedding import VocabParallelEmbedding
from lib.layers.norm import add_layer_norm, add_rms_norm
from lib.layers.rotary import HeadShape, rotary_table, split_heads
from lib.layers.softmax import scaled_masked_softmax
from lib.parallel.groups import Group, ParallelGroups
from lib.workflow.shapes import Shape

OURS, TORCH, COMPILED, LIGER = "drydock", "torch", "compiled", "Liger"
FORWARD, BOTH, BACKWARD = "forward", "fwd + bwd", "backward"

_EPSILON = 1e-5

Tensors = tuple[Tensor, ...]
Gradients = Callable[[Tensors, Tensors, Tensors], Sequence[Tensor]]


def _gradients(outputs: Tensors, inputs: Tensors, upstreams: Tensors) -> Sequence[Tensor]:
    return torch.autograd.grad(outputs, inputs, upstreams)


@dataclass(frozen=True)
class Way:
    """One way to compute an operation.

    Attributes:
        forward: maps copies of the inputs, which it may write over, to the outputs.
        inputs: those that have a gradient.
        upstreams: gradients of the outputs; of copies of these, too, it may do what it likes.
        gradients: those of the inputs, from outputs, inputs and upstreams.
        joins: the inputs are parts, along the last dimension, of the other ways' single one.
    """

    forward: Callable[..., Tensors]
    inputs: Tensors
    upstreams: Tensors
    gradients: Gradients = _gradients
    joins: bool = False

    def with_forward(self, forward: Callable[..., Tensors]) -> Self:
        """The same with another forward, such as a compiled one."""
        return replace(self, forward=forward)


@dataclass(frozen=True)
class KernelCase:
    """An operation at one model's sizes.

    Attributes:
        ways: by name, made when called. Liger's raises ImportError where it is not installed.
        forward_bytes: see the module's table.
        backward_bytes: likewise.
        passes: those that are timed.
    """

    ways: dict[str, Callable[[], Way]]
    forward_bytes: int
    backward_bytes: int
    passes: tuple[str, ...] = (FORWARD, BOTH)

    def bytes_of(self, which: str) -> int:
        """Those of a pass."""
        both = {FORWARD: self.forward_bytes, BACKWARD: self.backward_bytes}
        return sum(both.values()) if which == BOTH else both[which]


class Setting:
    """A model's sizes, the number type and the device, and random tensors for them.

    Args:
        shape: the model and its batches.
        dtype: of activations and weights.
        device: of all tensors.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        model = shape.resolved()
        self.dtype, self.device = dtype, device
        self.length, self.batch = shape.seq_length, shape.micro_batch_size
        self.hidden, self.wide = model.hidden_size, model.ffn_hidden_size
        self.heads = HeadShape(model.num_attention_heads, model.num_query_groups, model.head_dim)
        self.theta = model.rope_theta
        multiple = model.vocab_size_multiple
        self.vocabulary = shape.vocab_size
        self.padded = -(-shape.vocab_size // multiple) * multiple
        self._generator = torch.Generator(device).manual_seed(1)

    def drawn(self, *sizes: int) -> Tensor:
        """Normally distributed, of these sizes."""
        return torch.randn(sizes, generator=self._generator, device=self.device, dtype=self.dtype)

    def hidden_states(self, columns: int | None = None) -> Tensor:
        """[S, B, columns], H of them by default."""
        return self.drawn(self.length, self.batch, columns or self.hidden)

    def tokens(self) -> Tensor:
        """[S, B], as often as in text: the n-th most frequent one has a share of about 1 / n."""
        shares = 1.0 / torch.arange(1, self.vocabulary + 1, device=self.device)
        count = self.length * self.batch
        drawn = torch.multinomial(shares, count, replacement=True, generator=self._generator)
        return drawn.view(self.length, self.batch)


def rms_norm_case(setting: Setting) -> KernelCase:
    """The residual sum and its root-mean-square normalisation."""
    inputs = (setting.hidden_states(), setting.hidden_states(), setting.drawn(setting.hidden))
    upstreams = (setting.hidden_states(), setting.hidden_states())

    def way(*, fused: bool) -> Way:
        return Way(partial(add_rms_norm, epsilon=_EPSILON, fused=fused), inputs, upstreams)

    def liger() -> Way:
        liger_fused_add_rms_norm = _liger("liger_fused_add_rms_norm")

        def forward(x: Tensor, branch: Tensor, weight: Tensor) -> Tensors:
            normed, stream = liger_fused_add_rms_norm(branch, x, weight, _EPSILON)
            return stream, normed

        return Way(forward, inputs, upstreams)

    moved = 4 * inputs[0].nbytes + inputs[2].nbytes
    return KernelCase(_ways(way, liger=liger), moved, moved + inputs[2].nbytes)


def layer_norm_case(setting: Setting) -> KernelCase:
    """The residual sum and its layer normalisation."""
    weights = (setting.drawn(setting.hidden), setting.drawn(setting.hidden))
    inputs = (setting.hidden_states(), setting.hidden_states(), *weights)
    upstreams = (setting.hidden_states(), setting.hidden_states())

    def way(*, fused: bool) -> Way:
        return Way(partial(add_layer_norm, epsilon=_EPSILON, fused=fused), inputs, upstreams)

    def liger() -> Way:
        liger_layer_norm = _liger("liger_layer_norm")

        def forward(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
            stream = x + branch
            return stream, liger_layer_norm(stream, weight, bias, _EPSILON)

        return Way(forward, inputs, upstreams)

    moved, size = 4 * inputs[0].nbytes, weights[0].nbytes
    return KernelCase(_ways(way, liger=liger), moved + 2 * size, moved + 3 * size)


def swiglu_case(setting: Setting) -> KernelCase:
    """The gated activation."""
    gate_up = setting.hidden_states(2 * setting.wide)
    upstreams = (setting.hidden_states(setting.wide),)

    def way(*, fused: bool) -> Way:
        def forward(x: Tensor) -> Tensors:
            return (swiglu(x, fused=fused),)

        return Way(forward, (gate_up,), upstreams)

    def liger() -> Way:
        liger_swiglu = _liger("liger_swiglu")

        def forward(gate: Tensor, up: Tensor) -> Tensors:
            return (liger_swiglu(gate, up),)

        halves = tuple(half.contiguous() for half in gate_up.chunk(2, dim=-1))
        return Way(forward, halves, upstreams, joins=True)

    half = upstreams[0].nbytes
    return KernelCase(_ways(way, liger=liger), 3 * half, 5 * half)


def rotary_case(setting: Setting) -> KernelCase:
    """The cut of a fused projection into heads, queries and keys turned."""
    shape = setting.heads
    counts = (shape.num_heads, shape.num_groups, shape.num_groups)
    qkv = setting.hidden_states(sum(counts) * shape.head_dim)
    upstreams = tuple(
        setting.drawn(setting.length, setting.batch, count, shape.head_dim) for count in counts
    )
    table = rotary_table(setting.length, shape.head_dim, setting.theta, setting.device)

    def way(*, fused: bool) -> Way:
        cut = partial(split_heads, table=table, shape=shape, fused=fused)
        return Way(cut, (qkv,), upstreams)

    def liger() -> Way:
        liger_rope = _liger("liger_rope")

        cos, sin = table.repeat(1, 1, 2).to(setting.dtype).unsqueeze(1)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
            turned = liger_rope(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
            return (*(x.permute(2, 0, 1, 3) for x in turned), v)

        # In memory it wants [B, S, N, D].
        heads = qkv.unflatten(-1, (-1, shape.head_dim)).split(counts, dim=2)
        inputs = tuple(_batch_first(x) for x in heads)
        return Way(forward, inputs, tuple(_batch_first(x) for x in upstreams), joins=True)

    turned = upstreams[0].nbytes + upstreams[1].nbytes
    moved = (2 * turned + table.nbytes, 2 * qkv.nbytes + table.nbytes)
    return KernelCase(_ways(way, liger=liger), *moved)


def _batch_first(x_SBND: Tensor) -> Tensor:
    """The same numbers, laid out [B, S, N, D]."""
    return x_SBND.transpose(0, 1).contiguous().transpose(0, 1)


def cross_entropy_case(setting: Setting) -> KernelCase:
    """The mean loss of logits."""
    logits, labels = setting.hidden_states(setting.padded), setting.tokens()
    upstreams = (torch.ones((), device=setting.device),)
    vocabulary, alone = setting.vocabulary, Group()

    def way(*, fused: bool) -> Way:
        def forward(x: Tensor) -> Tensors:
            return (vocab_parallel_cross_entropy(x, labels, vocabulary, alone, fused=fused).mean(),)

        return Way(forward, (logits,), upstreams)

    def formula() -> Way:
        def forward(x: Tensor) -> Tensors:
            real = _real_columns(x, vocabulary).float()
            return (F.cross_entropy(real, labels.flatten()),)

        return Way(forward, (logits,), upstreams)

    def liger() -> Way:
        liger_cross_entropy = _liger("liger_cross_entropy")

        def forward(x: Tensor) -> Tensors:
            return (liger_cross_entropy(_real_columns(x, vocabulary), labels.flatten()),)

        # Its loss has the type of the logits, and so has the gradient of that.
        return Way(forward, (logits,), (upstreams[0].to(setting.dtype),))

    moved = (logits.nbytes + labels.nbytes, 2 * logits.nbytes + labels.nbytes)
    return KernelCase(_ways(way, compiled=formula, liger=liger), *moved)


def _real_columns(logits_SBV: Tensor, vocabulary: int) -> Tensor:
    """Logits without padding, [S B, vocabulary]; a cut's gradient is a copy, so only if needed."""
    rows = logits_SBV.flatten(0, 1)
    return rows if rows.shape[1] == vocabulary else rows[:, :vocabulary]


def softmax_case(setting: Setting) -> KernelCase:
    """The causal softmax of attention scores."""
    heads, length = setting.heads, setting.length
    sizes = (setting.batch, heads.num_heads, length, length)
    scores, upstreams = setting.drawn(*sizes), (setting.drawn(*sizes),)
    scale = heads.head_dim**-0.5

    def way(*, fused: bool) -> Way:
        def forward(x: Tensor) -> Tensors:
            return (scaled_masked_softmax(x, scale, None, fused=fused),)

        return Way(forward, (scores,), upstreams)

    seen = scores.nbytes // length**2 * (length * (length + 1) // 2)
    return KernelCase(_ways(way), seen + scores.nbytes, 3 * seen)


def embedding_gradient_case(setting: Setting) -> KernelCase:
    """The gradient of looked-up vectors, added to fp32 sums; the look-up itself is torch's."""
    table, tokens = setting.drawn(setting.padded, setting.hidden), setting.tokens()
    upstreams = (setting.hidden_states(),)

    def way(*, fused: bool) -> Way:
        with setting.device:
            layer = VocabParallelEmbedding(
                setting.padded, setting.hidden, ParallelGroups(), fused=fused
            )
        weight = layer.weight
        weight.data = table
        weight.grad_dtype = torch.float32
        weight.grad = torch.zeros_like(table, dtype=torch.float32)

        def gradients(outputs: Tensors, _: Tensors, upstreams: Tensors) -> Sequence[Tensor]:
            outputs[0].backward(upstreams[0])
            assert weight.grad is not None
            return (weight.grad,)

        return Way(lambda: (layer(tokens),), (), upstreams, gradients)

    rows = 2 * 4 * len(tokens.unique()) * setting.hidden
    moved = upstreams[0].nbytes + tokens.nbytes + rows
    return KernelCase(_ways(way), 0, moved, passes=(BACKWARD,))


def _liger(name: str) -> Callable[..., Any]:
    """A function of the package liger-kernel, which is no dependency: calls are as of its 0.8.5.

    Raises:
        ImportError: it is not installed, or this version has no such function.
    """
    functions = importlib.import_module("liger_kernel.transformers.functional")
    if not hasattr(functions, name):
        raise ImportError(name)
    return getattr(functions, name)


def _ways(
    way: Callable[..., Way],
    *,
    compiled: Callable[[], Way] | None = None,
    liger: Callable[[], Way] | None = None,
) -> dict[str, Callable[[], Way]]:
    """All ways of a case; what is to be compiled is not compiled yet."""
    found = {
        OURS: lambda: way(fused=True),
        TORCH: lambda: way(fused=False),
        COMPILED: compiled or (lambda: way(fused=False)),
    }
    return found if liger is None else found | {LIGER: liger}


# By the name of the module in kernels/.
CASES: dict[str, Callable[[Setting], KernelCase]] = {
    "rms_norm": rms_norm_case,
    "layer_norm": layer_norm_case,
    "swiglu": swiglu_case,
    "rotary": rotary_case,
    "cross_entropy": cross_entropy_case,
    "softmax": softmax_case,
    "embedding_gradient": embedding_gradient_case,
}


class Fresh:
    """Copies of what a way computes from, for one run, which may write over them."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._leaves = tuple(x.detach().requires_grad_() for x in way.inputs)
        # Gradients come to the leaves as they are: in-place operations want an input that is none.
        self._inputs = tuple(leaf.clone() for leaf in self._leaves)
        self._upstreams = tuple(x.clone() for x in way.upstreams)

    def forward(self) -> Tensors:
        """The outputs."""
        return self._way.forward(*self._inputs)

    def backward(self, outputs: Tensors) -> Sequence[Tensor]:
        """The gradients of the inputs."""
        return self._way.gradients(outputs, self._leaves, self._upstreams)


def results(way: Way) -> list[Tensor]:
    """Outputs, and gradients of the inputs; those of inputs that are parts of one are joined."""
    fresh = Fresh(way)
    outputs = fresh.forward()
    kept = [x.detach().clone() for x in outputs]  # backward may write over them
    gradients = fresh.backward(outputs)
    if way.joins:
        gradients = [torch.cat([x.flatten(2) for x in gradients], dim=-1)]
    return [*kept, *(x.detach() for x in gradients)]
