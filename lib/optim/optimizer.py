"""AdamW over fp32 master parameters, decaying matrices only.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w - lr (wd w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

(Loshchilov and Hutter, decoupled weight decay.) Whether a parameter decays is decided by its
shape: matrices do, vectors (norm weights and biases) do not.
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import AdamW

from lib.parallel.storage import local


def decays(parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, never to norm weights or biases."""
    return parameter.ndim >= 2


def decay_table(decay_by_name: Iterable[tuple[str, tuple[int, ...], bool]]) -> list[str]:
    """Which parameters decay, a line each; those that differ in the layer's number share one.

    Args:
        decay_by_name: of each parameter its global name, its whole shape and whether it decays.
    """
    lines: dict[str, int] = {}
    for name, shape, does_decay in decay_by_name:
        pattern = re.sub(r"\.\d+\.", ".N.", name)
        line = f"{pattern} {list(shape)}: {'decays' if does_decay else 'no decay'}"
        lines[line] = lines.get(line, 0) + 1
    return [f"{line} (x {count})" if count > 1 else line for line, count in lines.items()]


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> AdamW:
    """The optimizer; its learning rate is set before every step by ``set_learning_rate``.

    torch's fused kernel updates all parameters in one pass, on CPU as on GPU.
    """
    groups = [
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=betas,
        eps=epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


@torch.no_grad()
def update(optimizer: AdamW, divisor: torch.Tensor, skips: torch.Tensor) -> None:
    """Takes one step with all gradients divided, unless it is to be skipped.

    The host knows of neither yet. torch's fused kernel takes both, as from its own GradScaler; a
    skipped step leaves weights, moments and the number of steps as they were.

    Args:
        optimizer: from ``build_optimizer``.
        divisor: a scalar on the parameters' device.
        skips: whether to skip, a bool scalar there.
    """
    gradients = [
        local(p.grad)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    if any(gradient.dtype == torch.float64 for gradient in gradients):
        torch._foreach_div_(gradients, divisor.double())  # the kernel's divisor is fp32
    else:
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
    optimizer.found_inf = skips.float()  # type: ignore[attr-defined]
    optimizer.step()
