"""Each fused kernel against torch's own operations in float64: outputs and gradients.

By the layers that call them, so that what is checked is what a training uses. Shapes are small and
odd: an element beyond a block's end is where a kernel goes wrong first.

Shape legend: S sequence, B batch, H hidden, N heads, D head dimension, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from lib.hardware.findings import Finding, failed_by, fine, not_applicable
from lib.layers.activation import swiglu
from lib.layers.cross_entropy import vocab_parallel_cross_entropy
from lib.layers.embedding import VocabParallelEmbedding
from lib.layers.fused import runs_kernels
from lib.layers.gpu_limits import OLDEST_FOR_BF16
from lib.layers.norm import add_layer_norm, add_rms_norm
from lib.layers.rotary import HeadShape, rotary_table, rotate, split_heads
from lib.layers.softmax import scaled_masked_softmax
from lib.parallel.groups import Group, ParallelGroups

Outputs = Tensor | tuple[Tensor, ...]

# How many roundings of the dtype an element may be off, of its size or of a typical one.
_ROUNDINGS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 32}
_EPSILON, _THETA, _SCALE = 1e-5, 10000.0, 0.3
_SEQUENCE, _BATCH, _HEADS, _HEAD_DIM = 9, 3, HeadShape(4, 2, 24), 24
_VOCABULARY, _REAL, _HIDDEN = 77, 70, 200


@dataclass(frozen=True)
class FusedOp:
    """An operation that has a fused kernel.

    Attributes:
        name: what it is called in the table.
        shapes: of its inputs, all of one dtype; each gets a gradient.
        run: computes it, by the kernel if told so; may overwrite its inputs.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[[list[Tensor], bool], Outputs]


class WrongKernel(ArithmeticError):
    """A kernel's numbers are not those of the formula."""


def _layer_norm(inputs: list[Tensor], fused: bool) -> Outputs:
    x, branch, weight, bias = inputs
    return add_layer_norm(x, branch, weight, bias, _EPSILON, fused=fused)


def _rms_norm(inputs: list[Tensor], fused: bool) -> Outputs:
    x, branch, weight = inputs
    return add_rms_norm(x, branch, weight, _EPSILON, fused=fused)


def _swiglu(inputs: list[Tensor], fused: bool) -> Outputs:
    return swiglu(inputs[0], fused=fused)


def _rotate(inputs: list[Tensor], fused: bool) -> Outputs:
    return rotate(inputs[0], _table(inputs[0]), fused=fused)


def _split_heads(inputs: list[Tensor], fused: bool) -> Outputs:
    return split_heads(inputs[0], _table(inputs[0]), _HEADS, fused=fused)


def _table(x: Tensor) -> Tensor:
    return rotary_table(x.shape[0], _HEAD_DIM, _THETA, x.device)


def _softmax(inputs: list[Tensor], fused: bool) -> Outputs:
    return scaled_masked_softmax(inputs[0], _SCALE, None, fused=fused)


def _cross_entropy(inputs: list[Tensor], fused: bool) -> Outputs:
    logits_SBV = inputs[0]
    labels_SB = torch.arange(_SEQUENCE * _BATCH, device=logits_SBV.device) * 7 % _REAL
    return vocab_parallel_cross_entropy(
        logits_SBV,
        labels_SB.view(_SEQUENCE, _BATCH),
        _REAL,
        Group(),
        fused=fused,
        label_smoothing=0.1,
        z_loss=1e-2,
    )


def _embedding(inputs: list[Tensor], fused: bool) -> Outputs:
    table = inputs[0]
    # Few rows, each of several tokens: their gradients are added up.
    tokens = torch.arange(_SEQUENCE * _BATCH, device=table.device) % 5 * 3
    layer = VocabParallelEmbedding(_VOCABULARY, _HIDDEN, ParallelGroups(), fused=fused)
    found = functional_call(layer, {"weight": table}, (tokens.view(_SEQUENCE, _BATCH),))
    assert isinstance(found, Tensor)
    return found


_STREAM = (_SEQUENCE, _BATCH, _HIDDEN)
_QKV = (_HEADS.num_heads + 2 * _HEADS.num_groups) * _HEAD_DIM
FUSED_OPS = (
    FusedOp("layer norm", (_STREAM, _STREAM, (_HIDDEN,), (_HIDDEN,)), _layer_norm),
    FusedOp("RMS norm", (_STREAM, _STREAM, (_HIDDEN,)), _rms_norm),
    FusedOp("SwiGLU", ((_SEQUENCE, _BATCH, 2 * 100),), _swiglu),
    FusedOp("rotary positions", ((_SEQUENCE, _BATCH, 4, _HEAD_DIM),), _rotate),
    FusedOp("heads of a projection", ((_SEQUENCE, _BATCH, _QKV),), _split_heads),
    FusedOp("scaled masked softmax", ((_BATCH, 2, 37, 37),), _softmax),
    FusedOp("cross entropy", ((_SEQUENCE, _BATCH, _VOCABULARY),), _cross_entropy),
    FusedOp("embedding gradient", ((_VOCABULARY, _HIDDEN),), _embedding),
)


def check_kernels(
    device: torch.device, ops: Sequence[FusedOp] = FUSED_OPS, kind: str = ""
) -> Iterable[Finding]:
    """A finding for each kernel on a device.

    Args:
        device: a GPU, or a CPU with Triton's interpreter.
        ops: what to check.
        kind: name of the GPU, told in the findings.
    """
    place = f" on {kind}" if kind else ""
    dtypes = [dtype for dtype in served_dtypes(device) if _serves(device, dtype)]
    if not dtypes:
        yield not_applicable("kernels", "they run on GPUs; here layers use torch's operations")
        return
    for op in ops:
        yield _checked(f"kernel: {op.name}{place}", op, dtypes, device)


def served_dtypes(device: torch.device) -> list[torch.dtype]:
    """Number types to check: the interpreter rounds bf16 wrongly, and older GPUs lack it."""
    half = [torch.float32, torch.float16]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST_FOR_BF16:
        return [*half, torch.bfloat16]
    return half


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return runs_kernels(torch.empty(1, dtype=dtype, device=device))


def _checked(
    name: str, op: FusedOp, dtypes: Sequence[torch.dtype], device: torch.device
) -> Finding:
    try:
        for dtype in dtypes:
            require_right(op, dtype, device)
    except WrongKernel as error:
        return Finding(
            name=name,
            status="failed",
            seen=str(error),
            meaning="the kernel computes wrong numbers here: a training with it learns the wrong "
            "thing without an error",
            remedy="runtime.kernels: torch; install the triton of requirements.lock, remove "
            "~/.triton/cache, and update the driver",
            device=device.type,
        )
    except Exception as error:
        return failed_by(name, error, device.type)
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return fine(name, f"as torch in {names}", device.type)


def require_right(op: FusedOp, dtype: torch.dtype, device: torch.device) -> None:
    """Compares outputs and gradients of a kernel with the formula in float64 on the CPU.

    Raises:
        WrongKernel: they are further off than by rounding.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in op.shapes]
    found = _outputs_and_gradients(op, [x.to(device) for x in inputs], dtype, fused=True)
    truth = _outputs_and_gradients(op, [x.double() for x in inputs], dtype, fused=False)
    outputs = len(truth) - len(inputs)
    for index, (one, expected) in enumerate(zip(found, truth, strict=True)):
        one = one.double().cpu()
        unit = _ROUNDINGS[dtype] * torch.finfo(dtype).eps
        bound = unit * (expected.abs() + expected.square().mean().sqrt())
        excess = (one - expected).abs() / bound
        if not bool((excess <= 1.0).all()):  # not a number is wrong too
            which = f"output {index + 1}" if index < outputs else f"gradient {index - outputs + 1}"
            kind = str(dtype).removeprefix("torch.")
            times = excess.max().item()
            raise WrongKernel(f"wrong {which} in {kind}, {times:.3g} times what rounding may do")


def _outputs_and_gradients(
    op: FusedOp, inputs: list[Tensor], dtype: torch.dtype, *, fused: bool
) -> list[Tensor]:
    """All outputs, then the gradients of all inputs; what comes from above has ``dtype``'s bits."""
    leaves = [x.requires_grad_() for x in inputs]
    found = op.run([x.clone() for x in leaves], fused)  # what is handed over may be overwritten
    outputs = (found,) if isinstance(found, Tensor) else found
    kept = [y.detach().clone() for y in outputs]
    generator = torch.Generator().manual_seed(2)
    upstreams = [torch.randn(y.shape, generator=generator).to(dtype).to(y) for y in outputs]
    return [*kept, *torch.autograd.grad(outputs, leaves, upstreams)]
