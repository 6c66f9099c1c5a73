"""Tensor-parallel linear layers.

Shape legend: S sequence, B batch, I input size, O output size, T tensor-parallel degree.

    ColumnParallelLinear   x_SBI  @ [W1 | W2 | ... | WT]^T   each rank: O/T columns of the output
    RowParallelLinear      [x1 | ... | xT] @ [W1; ...; WT]   each rank: a partial sum, then reduced

A column-parallel layer may hold several weights ("parts") that read the same input, such as
query, key and value: they share one collective in backward, and each keeps a name and a shape
that do not depend on the layout.

| tensor | column, local shape | row, local shape |
|---|---|---|
| weight | [O/T, I] | [O, I/T] |
| bias | [O/T] | [O], added once after the reduction |
| input | [S, B, I] | [S, B, I/T] |
| output | [S, B, O/T] | [S, B, O] |
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lib.parallel.collectives import copy_to_group, reduce_from_group
from lib.parallel.groups import Group
from lib.parallel.storage import local, replica, shard


class ColumnPart(nn.Module):
    """Weight and bias of one output of a column-parallel layer."""

    def __init__(self, input_size: int, output_size: int, group: Group, *, bias: bool) -> None:
        super().__init__()
        self.weight = shard((output_size, input_size), 0, group)
        self.bias = shard((output_size,), 0, group) if bias else None

    def forward(self, x_SBI: Tensor) -> Tensor:
        """The local columns of this part's output."""
        bias = None if self.bias is None else local(self.bias)
        return F.linear(x_SBI, local(self.weight), bias)


class ColumnParallelLinear(nn.Module):
    """Several linear maps of one input, their outputs cut over the group.

    Args:
        input_size: I, whole on every rank.
        output_sizes: full output size of each part by name; the group's size divides each.
        group: tensor-parallel group.
        bias: whether each part has a bias.
    """

    def __init__(
        self, input_size: int, output_sizes: dict[str, int], group: Group, *, bias: bool
    ) -> None:
        super().__init__()
        self.group = group
        self.names = tuple(output_sizes)
        for name, output_size in output_sizes.items():
            self.add_module(name, ColumnPart(input_size, output_size, group, bias=bias))

    def forward(self, x_SBI: Tensor) -> tuple[Tensor, ...]:
        """Maps [S, B, I] to one [S, B, O/T] a part, in the order of the parts."""
        x_SBI = copy_to_group(x_SBI, self.group)
        return tuple(self.get_submodule(name)(x_SBI) for name in self.names)


class RowParallelLinear(nn.Module):
    """A linear map whose input is cut over the group; the output is whole on every rank."""

    def __init__(self, input_size: int, output_size: int, group: Group, *, bias: bool) -> None:
        super().__init__()
        self.group = group
        self.weight = shard((output_size, input_size), 1, group)
        self.bias = replica((output_size,), group) if bias else None

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Maps the local [S, B, I/T] to the whole [S, B, O]."""
        y_SBO = reduce_from_group(F.linear(x_SBI, local(self.weight)), self.group)
        return y_SBO if self.bias is None else y_SBO + local(self.bias)
