"""Adds the gradient of a parameter to what it has, in the gradient's own precision.

A parameter of bf16 may have an fp32 ``grad`` (``lib.parallel.data_parallel`` gives it one), in
which the micro batches of a step add up: 256 + 1 is 256 in bf16. Matrix products add their result
to it themselves, which saves writing and reading it once more. Nor is zero written first: a
parameter declared ``overwritable`` has an ``overwrite_grad`` that says that its ``grad`` holds
nothing of this step yet, and the first product replaces it.

A layer's backward returns what these functions return: None where the gradient was added here.
"""

import torch
from torch import Tensor, nn


def overwritable(weight: nn.Parameter) -> nn.Parameter:
    """Marks a weight whose gradient comes from ``product_gradient`` first in each micro batch."""
    weight.overwrite_grad = False  # type: ignore[attr-defined]
    return weight


def product_gradient(weight: Tensor, grad_MO: Tensor, x_MI: Tensor) -> Tensor | None:
    """The gradient of ``x @ weight^T`` by the weight, grad^T @ x, [O, I].

    Args:
        weight: [O, I], a leaf if it has a ``grad`` to add to.
        grad_MO: gradient of the product, of the weight's dtype.
        x_MI: what was multiplied.
    """
    total = weight.grad if weight.is_leaf else None
    if total is None:
        return grad_MO.t() @ x_MI
    if getattr(weight, "overwrite_grad", False):
        weight.overwrite_grad = False  # type: ignore[attr-defined]
        _multiply(grad_MO.t(), x_MI, total)
    else:
        _multiply_add(grad_MO.t(), x_MI, total)
    return None


def _multiply(a: Tensor, b: Tensor, result: Tensor) -> None:
    if a.dtype == result.dtype:
        torch.mm(a, b, out=result)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, result.dtype, out=result)
    else:
        torch.mm(a.to(result.dtype), b.to(result.dtype), out=result)


def _multiply_add(a: Tensor, b: Tensor, total: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def sum_gradient(bias: Tensor | None, grad_MO: Tensor) -> Tensor | None:
    """The gradient of ``y + bias`` by the bias, the sum of the rows of ``grad_MO``."""
    if bias is None:
        return None
    total = bias.grad if bias.is_leaf else None
    if total is None:
        return grad_MO.sum(0)
    total.add_(grad_MO.sum(0, dtype=total.dtype))
    return None
