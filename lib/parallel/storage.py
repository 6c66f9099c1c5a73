"""Parameters as a layer computes with them, and the parameters that they are stored as.

A layer declares each parameter with ``shard``, ``replica`` or ``stacked``, which record how the
tensor-parallel group cuts it. What is stored (saved, clipped, updated; see
``lib.parallel.masters``) has a name and a shape that depend on no layout; what is computed with
may hold several stored ones, one below the other, so that one matrix product serves all:

| computed with | stored |
|---|---|
| linear_qkv.weight, [q rows; k rows; v rows] | linear_qkv.q.weight, linear_qkv.k.weight, ... |
| every other parameter | the same |
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lib.parallel.groups import Group


@dataclass(frozen=True)
class Cut:
    """How the tensor-parallel group holds one stored parameter.

    Attributes:
        full_shape: the shape without any parallelism.
        dim: the dimension cut into ``group.size`` equal parts; None where every rank holds all.
        group: the tensor-parallel group.
        used: rows of the held part that this rank computes with; None: all.
        sums_gradient: whether each rank has a part of the gradient of what all hold. The parts
            are summed once, at the end of a step, or the ranks' copies would drift apart.
    """

    full_shape: tuple[int, ...]
    dim: int | None
    group: Group
    used: slice | None = None
    sums_gradient: bool = False

    def part_of(self, full: Tensor) -> Tensor:
        """What this rank holds of a full tensor (a view)."""
        if self.dim is None:
            return full
        return full.chunk(self.group.size, dim=self.dim)[self.group.rank]

    def used_of(self, held: Tensor) -> Tensor:
        """What this rank computes with of the part that it holds (a view)."""
        return held if self.used is None else held[self.used]

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the part that this rank holds."""
        shape = list(self.full_shape)
        if self.dim is not None:
            assert shape[self.dim] % self.group.size == 0
            shape[self.dim] //= self.group.size
        return tuple(shape)

    @property
    def used_rows(self) -> int:
        """How many rows this rank computes with."""
        return self.held_shape[0] if self.used is None else self.used.stop - self.used.start


@dataclass(frozen=True)
class Part:
    """A stored parameter's place in the one that a layer computes with.

    Attributes:
        cut: how the group holds it.
        owner: the module that computes with it.
        attribute: the owner's name of what it computes with.
        rows: the part's rows there.
    """

    cut: Cut
    owner: nn.Module
    attribute: str
    rows: slice

    @property
    def parameter(self) -> nn.Parameter:
        """What the layer computes with."""
        return self.owner.get_parameter(self.attribute)

    @property
    def value(self) -> Tensor:
        """This part of it, without a graph."""
        return self.parameter.data[self.rows]

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this part, on this rank alone."""
        gradient = self.parameter.grad
        return None if gradient is None else gradient[self.rows]


def shard(full_shape: tuple[int, ...], dim: int, group: Group) -> nn.Parameter:
    """An uninitialised parameter of which this rank holds one part along ``dim``."""
    return stacked({"": Cut(full_shape, dim, group)})


def replica(
    full_shape: tuple[int, ...], group: Group, *, sums_gradient: bool = False
) -> nn.Parameter:
    """An uninitialised parameter that every rank of the group holds whole.

    Args:
        full_shape: its shape.
        group: the tensor-parallel group.
        sums_gradient: whether each rank computes a part of its gradient.
    """
    return stacked({"": Cut(full_shape, None, group, sums_gradient=sums_gradient)})


def stacked(cuts: Mapping[str, Cut]) -> nn.Parameter:
    """An uninitialised parameter that holds what this rank uses of several, one below the other.

    Args:
        cuts: how the group holds each, by what its stored name has before the attribute's name
            ("" for nothing). All but the first dimension are alike.
    """
    rows = sum(cut.used_rows for cut in cuts.values())
    columns = next(iter(cuts.values())).held_shape[1:]
    parameter = nn.Parameter(torch.empty(rows, *columns))
    parameter.cuts = dict(cuts)  # type: ignore[attr-defined]
    return parameter


def cuts_of(parameter: Tensor) -> dict[str, Cut]:
    """What a parameter made by ``shard``, ``replica`` or ``stacked`` holds."""
    cuts = getattr(parameter, "cuts", None)
    assert isinstance(cuts, dict)
    return cuts


def named_parts(module: nn.Module) -> Iterator[tuple[str, Part]]:
    """The stored parameters of a module by name, each once, in the module's order."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            first = 0
            for name, cut in cuts_of(parameter).items():
                rows = slice(first, first + cut.used_rows)
                first = rows.stop
                stored = ".".join(piece for piece in (path, name, attribute) if piece)
                yield stored, Part(cut, owner, attribute, rows)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a stored tensor, as a plain one."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
