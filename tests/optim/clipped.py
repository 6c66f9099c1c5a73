"""Clipping as a step does it, at once and on its own."""

import math

import torch

from lib.optim.clipping import clipping_divisor, squared_norm
from lib.parallel.storage import local


def clip_gradients(parameters, max_norm, groups, *, copies=frozenset(), loss_scale=1.0):
    """Divides all gradients if their norm is finite; gives the norm of the unscaled gradient."""
    held = list(parameters)
    squared = squared_norm(held, groups, copies=copies)
    divisor = clipping_divisor(squared, max_norm, loss_scale)
    gradients = [local(p.grad) for p in held if p.grad is not None]
    if gradients and squared.isfinite():
        torch._foreach_div_(gradients, divisor.to(gradients[0].dtype))
    return math.sqrt(squared.item()) / loss_scale
