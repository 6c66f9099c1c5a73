"""The parameters of a few modules as layers compute with them, gathered and reduced together.

A block has two flat buffers: its parameters in the compute dtype, and the sum of their gradients
over micro batches, in fp32 or wider. Layers see views of both: parameters whose ``grad`` is there
already, so that autograd, or a layer's own backward, adds to it.

With R ranks that share the masters, each piece (one stored parameter) of n rows is cut into R
shards of ceil(n / R) rows, padded, so that one collective moves all pieces of a block:

    gather   masters -> send [width] in the compute dtype -> received [R, width] -> parameters
    reduce   gradients -> send [R, width] -> sum over the ranks, [width] -> gradients of the masters

One rank alone has nothing to send: masters are copied to the parameters, and its masters' gradients
are the buffer itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lib.parallel.collectives import (
    Pending,
    all_reduce,
    start_all_reduce,
    start_gather_first_dim,
    start_reduce_scatter_first_dim,
)
from lib.parallel.groups import Group
from lib.parallel.masters import gradient_of
from lib.parallel.storage import Part, local

_ALIGNMENT = 128  # elements: products and kernels are fast on addresses that 16 bytes divide


@dataclass(frozen=True)
class BlockPlan:
    """How the blocks of a model are kept.

    Attributes:
        compute_dtype: of parameters in forward and backward.
        shards: the ranks that share the masters.
        replicas: the ranks that hold the same shards.
        frees_values: whether parameters are gathered for each use, and dropped after it.
        frees_gradients: whether gradients are reduced after each micro batch, and dropped.
        lasts: whether what is to be dropped nevertheless stays while its chunk is at work.
    """

    compute_dtype: torch.dtype
    shards: Group
    replicas: Group
    frees_values: bool
    frees_gradients: bool
    lasts: bool


class _Buffer:
    """Memory that can be given back while views of it stay."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self._bytes = self.flat.untyped_storage().nbytes()

    @property
    def is_there(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self._bytes

    def allocate(self) -> None:
        if not self.is_there:
            self.flat.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)


class _Piece:
    """One stored parameter of a block.

    Attributes:
        master: what is updated.
        shard: this rank's rows of it.
        value: what is computed with, [used rows, ...].
        grad: its gradient on this rank.
        rows: rows of a shard, padding included.
        spans: for each rank the rows of its shard and of ``value`` that are the same; none if
            the rank has no row that is used here.
    """

    def __init__(self, part: Part, master: nn.Parameter, shards: Group) -> None:
        self.cut = part.cut
        self.master = master
        self.shard = local(master.detach())
        self.value = part.value
        grad = part.grad
        assert grad is not None
        self.grad = grad
        held = self.cut.held_shape[0]
        self.rows = -(-held // shards.size)
        self.columns = self.value[0].numel()
        used = self.cut.used or slice(0, held)
        self.spans: list[tuple[int, slice, slice]] = []
        for rank in range(shards.size):
            first = max(rank * self.rows, used.start)
            last = min((rank + 1) * self.rows, used.stop)
            if first < last:
                there = slice(first - rank * self.rows, last - rank * self.rows)
                self.spans.append((rank, there, slice(first - used.start, last - used.start)))

    @property
    def width(self) -> int:
        return self.rows * self.columns


class Block:
    """See the text of the module.

    Args:
        parts: the block's stored parameters by name; their owners' parameters are replaced.
        masters: by name.
        plan: how it is kept.
    """

    def __init__(
        self, parts: Mapping[str, Part], masters: Mapping[str, nn.Parameter], plan: BlockPlan
    ) -> None:
        self.plan = plan
        self.owes_reduction = False
        device = local(masters[next(iter(parts))]).device
        grad_dtype = torch.promote_types(plan.compute_dtype, torch.float32)
        owners = {(id(p.owner), p.attribute): p for p in parts.values()}
        sizes = [-(-part.parameter.numel() // _ALIGNMENT) * _ALIGNMENT for part in owners.values()]
        self._values = _Buffer(sum(sizes), plan.compute_dtype, device)
        self._gradients = _Buffer(sum(sizes), grad_dtype, device)
        flats = self._values.flat.split(sizes), self._gradients.flat.split(sizes)
        self._parameters = [
            _replace(part, value, grad)
            for part, value, grad in zip(owners.values(), *flats, strict=True)
        ]
        self._pieces = [_Piece(part, masters[name], plan.shards) for name, part in parts.items()]
        self._replaced = [p for p in self._parameters if hasattr(p, "overwrite_grad")]
        others = (p.grad for p in self._parameters if not hasattr(p, "overwrite_grad"))
        self._zeroed = [gradient for gradient in others if gradient is not None]
        self._width = sum(piece.width for piece in self._pieces)
        spanned = sum(
            (rows.stop - rows.start) * piece.columns
            for piece in self._pieces
            for _, rows, _ in piece.spans
        )
        self._has_padding = spanned < plan.shards.size * self._width
        self._is_ready = False
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._has_sum = False
        self._sum, shards = self._shard_gradients(device, grad_dtype)
        self._master_gradients = [
            gradient_of(piece.master, shard)
            for piece, shard in zip(self._pieces, shards, strict=True)
        ]
        if plan.frees_values:
            self._values.free()
        if plan.frees_gradients:
            self._gradients.free()

    def _shard_gradients(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Memory for the reduced gradients, and each master's part of it."""
        if self._is_alone and all(piece.cut.used is None for piece in self._pieces):
            return None, [piece.grad for piece in self._pieces]
        total = torch.zeros(self._width, dtype=dtype, device=device)
        pieces = total.split([piece.width for piece in self._pieces])
        return total, [
            flat[: piece.shard.numel()].view(piece.shard.shape)
            for flat, piece in zip(pieces, self._pieces, strict=True)
        ]

    @property
    def is_ready(self) -> bool:
        """Whether the parameters can be computed with."""
        return self._is_ready

    @property
    def _is_alone(self) -> bool:
        return self.plan.shards.size == 1

    def start(self, *, trains: bool, replaces: bool = True) -> None:
        """Before a step or a validation: the masters may have changed since the last one.

        Args:
            trains: whether gradients begin at zero.
            replaces: whether a first product may replace what is there instead.
        """
        self._drop_gather()
        self._is_ready = self._has_sum = False
        if self.plan.lasts or self._is_alone:
            self.begin_gather()
        if trains and not self.plan.frees_gradients:
            if replaces:
                self._clear()
            else:
                self._gradients.flat.zero_()

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Starts to bring the parameters here, unless they are, or are on their way."""
        if self._is_ready or self._gathering is not None:
            return
        if self._is_alone:
            used = [piece.cut.used_of(piece.shard) for piece in self._pieces]
            torch._foreach_copy_([piece.value for piece in self._pieces], used)
            self._is_ready = True
            return
        # Zeros where padding is, which goes around as well: a watch looks for what is no number.
        send = self._values.flat.new_zeros(self._width)
        flats = send.split([piece.width for piece in self._pieces])
        shards = [piece.shard.reshape(-1) for piece in self._pieces]
        mine = [flat[: shard.numel()] for flat, shard in zip(flats, shards, strict=True)]
        torch._foreach_copy_(mine, shards)
        self._gathering = start_gather_first_dim(send, self.plan.shards)

    @torch.no_grad()
    def ready(self) -> None:
        """Waits until the parameters can be computed with."""
        self.begin_gather()
        if self._gathering is None:
            return
        self._values.allocate()
        there, here = self._pairs(self._gathering.wait(), [p.value for p in self._pieces])
        torch._foreach_copy_(here, there)
        self._gathering = None
        self._is_ready = True

    def release(self) -> None:
        """After a use: drops the parameters, if they are gathered for each."""
        if self.plan.frees_values:
            self._values.free()
            self._is_ready = False

    def begin_backward(self) -> None:
        """Before a backward through the block."""
        self.ready()
        if self.plan.frees_gradients and not self._gradients.is_there:
            self._gradients.allocate()
            self._clear()

    @torch.no_grad()
    def reduce(self) -> None:
        """Starts to sum the gradients over the ranks; they are complete on this one."""
        self.collect()
        self._settle()
        self.owes_reduction = False
        if self._is_alone:
            self._reduce_alone()
            return
        shape = self.plan.shards.size, self._width
        # Padding is summed with everything else: it must not hold what is no number.
        new = (
            self._gradients.flat.new_zeros if self._has_padding else self._gradients.flat.new_empty
        )
        send = new(shape)
        there, here = self._pairs(send, [piece.grad for piece in self._pieces])
        torch._foreach_copy_(there, here)
        if self.plan.frees_gradients:
            self._gradients.free()
        into = None if self._has_sum else self._sum
        self._reducing = start_reduce_scatter_first_dim(send.view(-1), self.plan.shards, into)

    def _reduce_alone(self) -> None:
        if self._sum is not None:
            assert not self._has_sum
            self._sum.zero_()  # rows that others use hold what the ranks summed in the last step
            targets = [
                piece.cut.used_of(local(gradient))
                for piece, gradient in zip(self._pieces, self._master_gradients, strict=True)
            ]
            torch._foreach_copy_(targets, [piece.grad for piece in self._pieces])
        total = self._gradients.flat if self._sum is None else self._sum
        self._reducing = start_all_reduce(total, self.plan.replicas)

    @torch.no_grad()
    def collect(self) -> None:
        """Waits for a reduction under way, and adds its result to earlier ones of the step."""
        if self._reducing is None:
            return
        result = self._reducing.wait()
        if self._has_sum and self._sum is not None:
            self._sum += result
        self._reducing, self._has_sum = None, True

    def finish(self) -> None:
        """At the end of a step: gives the masters their gradients."""
        self.collect()
        self._drop_gather()
        if not self._is_alone and self._sum is not None:
            all_reduce(self._sum, self.plan.replicas)
        for piece, gradient in zip(self._pieces, self._master_gradients, strict=True):
            piece.master.grad = gradient

    def _drop_gather(self) -> None:
        """Ends a gather that nobody has used: the masters may change now."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def partial_gradients(self) -> list[Tensor]:
        """This rank's shards of gradients of which each tensor-parallel rank has a part."""
        return [
            local(gradient)
            for piece, gradient in zip(self._pieces, self._master_gradients, strict=True)
            if piece.cut.sums_gradient
        ]

    def _clear(self) -> None:
        """Sets gradients to zero, or says that the first one is to replace what is there."""
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        for parameter in self._replaced:
            parameter.overwrite_grad = True  # type: ignore[attr-defined]

    def _settle(self) -> None:
        """Zeroes gradients that were to be replaced, and were not."""
        for parameter in self._replaced:
            if parameter.overwrite_grad:  # type: ignore[attr-defined]
                assert parameter.grad is not None
                parameter.grad.zero_()
                parameter.overwrite_grad = False  # type: ignore[attr-defined]

    def _pairs(self, whole: Tensor, held: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The same elements in what ranks exchange, [R * width], and in each piece's tensor."""
        ranks = whole.view(self.plan.shards.size, self._width)
        there: list[Tensor] = []
        here: list[Tensor] = []
        first = 0
        for piece, tensor in zip(self._pieces, held, strict=True):
            for rank, theirs, mine in piece.spans:
                start = first + theirs.start * piece.columns
                there.append(ranks[rank, start : first + theirs.stop * piece.columns])
                here.append(tensor[mine].view(-1))
            first += piece.width
        return there, here


def _replace(part: Part, value: Tensor, grad: Tensor) -> nn.Parameter:
    """Gives an owner a parameter in a block's buffers for the one that it declared."""
    declared = part.parameter
    count, shape = declared.numel(), declared.shape
    parameter = nn.Parameter(value[:count].view(shape))
    parameter.grad_dtype = grad.dtype
    parameter.grad = grad[:count].view(shape)
    vars(parameter).update(vars(declared))  # how it is cut, and whether it can be overwritten
    setattr(part.owner, part.attribute, parameter)
    return parameter
