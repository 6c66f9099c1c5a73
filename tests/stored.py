"""Parameters of modules by stored name, and their gradients as masters get them."""

import torch

from lib.parallel.collectives import all_reduce
from lib.parallel.storage import Part, named_parts


def values_of(module):
    """Copies of what this rank computes with."""
    return {name: part.value.clone() for name, part in named_parts(module)}


def fill(module, weights, dtype=torch.float64):
    """Gives a module, of this number type then, its parts of whole weights by stored name."""
    module.to(dtype)
    for name, part in named_parts(module):
        assert part.cut.full_shape == tuple(weights[name].shape)
        part.value.copy_(part.cut.used_of(part.cut.part_of(weights[name].detach())))


def own_gradient(part: Part):
    """The gradient on this rank alone of what it holds: nothing where it does not compute."""
    if part.grad is None:
        return None
    held = part.grad.new_zeros(part.cut.held_shape)
    part.cut.used_of(held).copy_(part.grad)
    return held


def gradients_of(module):
    """Gradients of what this rank holds; what is a part on each rank is summed over the ranks."""
    gradients = {name: own_gradient(part) for name, part in named_parts(module)}
    for name, part in named_parts(module):
        if part.cut.sums_gradient and gradients[name] is not None:
            all_reduce(gradients[name], part.cut.group)
    return gradients
