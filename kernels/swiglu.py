"""SwiGLU, the gated activation, of gate and up in one tensor.

    y = silu(gate) up,   silu(z) = z s(z),   s(z) = 1 / (1 + exp(-z))        (Shazeer, GLU variants)

A matrix product leaves both halves of a row side by side, [gate | up]: the kernel reads them where
they are. Backward, with g the gradient of y and s = s(gate), is one pass too:

    d gate = g up s (1 + gate (1 - s))
    d up   = g gate s

and writes both over gate and up, element by element where it has read them: this pair is the
widest activation of a layer, and its gradient would be as large again. So backward can run once.
All arithmetic is in fp32.

Shape legend: M rows (all leading dimensions), F columns of the result.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

# Of bf16, one load of 16 bytes of each half for each thread. Blocks do not cross rows, and the
# widths of models leave the last block of a row partly empty: small blocks keep that small.
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _swiglu_forward(
    gate_up,  # [M, 2 F]
    y,  # [M, F] out
    columns,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * 2 * columns + column
    gate = tl.load(gate_up + place, mask=inside).to(tl.float32)
    up = tl.load(gate_up + place + columns, mask=inside).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(y + row * columns + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    gate_up,  # [M, 2 F], out: its gradient
    grad_y,  # [M, F]
    columns,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * 2 * columns + column
    gate = tl.load(gate_up + place, mask=inside).to(tl.float32)
    up = tl.load(gate_up + place + columns, mask=inside).to(tl.float32)
    grad = tl.load(grad_y + row * columns + column, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    grad_gate = grad * up * s * (1.0 + gate * (1.0 - s))
    grad_up = grad * gate * s
    tl.store(gate_up + place, grad_gate.to(gate_up.dtype.element_ty), mask=inside)
    tl.store(gate_up + place + columns, grad_up.to(gate_up.dtype.element_ty), mask=inside)


def _grid(y: Tensor) -> tuple[int, int]:
    columns = y.shape[-1]
    return y.numel() // columns, -(-columns // _BLOCK)


def _activate(gate_up: Tensor) -> Tensor:
    columns = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], columns)
    launch: Any = _swiglu_forward[_grid(y)]
    launch(gate_up, y, columns, BLOCK=_BLOCK, num_warps=_WARPS)
    return y


def _overwrite_with_gradient(gate_up: Tensor, grad_y: Tensor) -> None:
    grad_y = grad_y.contiguous()
    launch: Any = _swiglu_backward[_grid(grad_y)]
    launch(gate_up, grad_y, grad_y.shape[-1], BLOCK=_BLOCK, num_warps=_WARPS)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        assert gate_up.is_contiguous()
        ctx.save_for_backward(gate_up)
        return _activate(gate_up)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        _overwrite_with_gradient(gate_up, grads[0])
        increment_version(gate_up)  # whoever saved it too, or comes here twice, gets an error
        return gate_up.detach()


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the gate times up.

    Args:
        gate_up: [..., 2 F], contiguous, the gate first; fp32, bf16 or fp16. Backward overwrites it
            with its gradient, so it can run once, and nothing else may need these values then.

    Returns:
        [..., F], of the same dtype.
    """
    return _SwiGLU.apply(gate_up)
