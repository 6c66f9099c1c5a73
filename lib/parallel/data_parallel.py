"""Data parallelism: when parameters are gathered and gradients reduced.

The masters (``lib.parallel.masters``) are fp32 or wider and sharded; layers compute with copies of
them in the compute dtype, and gradients of a step's micro batches are added up in fp32 or wider
(``lib.parallel.compute_block``).

| sharding | parameters | gradients | communication of a step with m micro batches |
|---|---|---|---|
| optimizer | gathered once a step | whole, reduced with the last | 1 gather, 1 reduction |
| gradients | gathered once a step | sharded, reduced with each | 1 gather, m reductions |
| parameters | gathered for each use | sharded, reduced with each | 2 m gathers, m reductions |

Master weights and moments are sharded in all three. On a grid with replicas the shards' gradients
are summed over the replicas as well.

Collectives go on beside the work: the ends of the model are gathered before a step's first forward,
of the layers always the next while this one computes; a layer's gradients are reduced while
backward goes on to the layers before it, those of two blocks at once. All at once would take as
much memory again as the parameters, or the gradients. What a layer's module is told of this are two
identities in the graph, at its input and at its output, put there by hooks; where one rank holds
everything, there is nothing to tell and there are no hooks.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lib.parallel.collectives import all_reduce
from lib.parallel.compute_block import Block, BlockPlan
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import Part

Sharding = Literal["optimizer", "gradients", "parameters"]
# Reductions under way at once. The last block's ends after all others however many there are.
MOST_REDUCTIONS = 2
Neighbours = tuple[Block | None, Block | None]  # the next one of a forward pass, of a backward pass


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and reduced together.

    Attributes:
        modules: in the order in which they are called.
        lasts: whether the parameters stay for a whole step in any case, because others compute
            with them too, or they are few.
    """

    modules: tuple[nn.Module, ...]
    lasts: bool


class DataParallel:
    """Keeps the parameters that this rank's chunks of the model compute with.

    Args:
        chunks: the units of each chunk, in the order of the forward pass.
        parts: the stored parameters that the units hold, by global name.
        masters: by the same names, from ``lib.parallel.masters.create_masters``.
        compute_dtype: dtype of parameters and activations in forward and backward.
        groups: of this rank.
        sharding: what is sharded between uses.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Unit]],
        parts: Mapping[str, Part],
        masters: Mapping[str, nn.Parameter],
        compute_dtype: torch.dtype,
        groups: ParallelGroups,
        sharding: Sharding,
    ) -> None:
        self._tp = groups.tp
        # A rank that holds all masters has no memory to save.
        kept = sharding if groups.shards.size > 1 else "optimizer"
        self._reduces_each = kept != "optimizer"
        self._in_backward = self._reduces = False
        self._reducing: deque[Block] = deque()  # the oldest first
        self._chunks: list[list[Block]] = []
        for units in chunks:
            self._chunks.append([])
            for unit in units:
                plan = BlockPlan(
                    compute_dtype,
                    groups.shards,
                    groups.replicas,
                    frees_values=kept == "parameters" and not unit.lasts,
                    frees_gradients=self._reduces_each,
                    lasts=unit.lasts,
                )
                owners = {owner for module in unit.modules for owner in module.modules()}
                held = {name: part for name, part in parts.items() if part.owner in owners}
                self._chunks[-1].append(Block(held, masters, plan))
        if groups.dp.size > 1:
            firsts = [blocks[0] for blocks in self._chunks[1:]]
            for number, (units, blocks) in enumerate(zip(chunks, self._chunks, strict=True)):
                # Parameters that stay are fetched across chunks, in the order of first use.
                has_next = number < len(firsts) and kept != "parameters"
                self._put_hooks(units, blocks, firsts[number] if has_next else None)

    @property
    def _blocks(self) -> list[Block]:
        return [block for blocks in self._chunks for block in blocks]

    def start(self, *, trains: bool, replaces: bool = True) -> None:
        """Before any forward of a step or of a validation: the masters may have changed.

        Args:
            trains: whether backwards follow, so that gradients begin at zero.
            replaces: whether the first product may replace a gradient that was not zeroed.
        """
        for block in self._blocks:
            block.start(trains=trains, replaces=replaces)
        self._chunks[0][0].begin_gather()  # which no other module does

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        """Before each backward of a chunk.

        Args:
            chunk: its place among this rank's chunks.
            is_last: whether it is the chunk's last of the step.
        """
        self._in_backward = True
        self._reduces = is_last or self._reduces_each
        for block in self._chunks[chunk]:
            block.owes_reduction = self._reduces
            if block.plan.lasts:
                block.begin_backward()

    def after_backward(self, chunk: int) -> None:
        """After it: reduces what had to wait for its end."""
        self._in_backward = False
        for block in self._chunks[chunk]:
            if block.owes_reduction:
                self._reduce(block)

    def _reduce(self, block: Block) -> None:
        """Starts to reduce a block's gradients, once one of those under way has ended."""
        while len(self._reducing) >= MOST_REDUCTIONS:
            self._reducing.popleft().collect()
        block.reduce()
        self._reducing.append(block)

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward of a step: the masters have their gradients, complete.

        They are summed over all data-parallel ranks; where each tensor-parallel rank has a part
        of the gradient of what all hold, over those as well, all at once.
        """
        for block in self._blocks:
            block.finish()
        self._reducing.clear()
        partial = [each for block in self._blocks for each in block.partial_gradients()]
        if self._tp.size == 1 or not partial:
            return
        total = all_reduce(torch.cat([each.reshape(-1) for each in partial]), self._tp)
        sums = total.split([each.numel() for each in partial])
        torch._foreach_copy_(partial, [s.view_as(p) for s, p in zip(sums, partial, strict=True)])

    def _put_hooks(self, units: Sequence[Unit], blocks: list[Block], then: Block | None) -> None:
        """Hooks of a chunk's modules, after whose last forward another block is needed, or none."""
        for place, (unit, block) in enumerate(zip(units, blocks, strict=True)):
            neighbours = (
                blocks[place + 1] if place + 1 < len(blocks) else then,
                blocks[place - 1] if place > 0 else None,
            )
            unit.modules[0].register_forward_pre_hook(partial(self._enter, block, neighbours))
            if block.plan.frees_gradients and not unit.lasts:
                unit.modules[-1].register_forward_hook(partial(self._leave, block, neighbours))

    def _enter(
        self,
        block: Block,
        neighbours: Neighbours,
        _module: nn.Module,
        inputs: tuple[object, ...],
    ) -> tuple[object, ...] | None:
        """Before a module computes: its parameters are here, the next one's on their way."""
        # Computed again and here already, it is the last of its group: the next one is done with.
        is_last = self._in_backward and block.is_ready
        self._fetch(block, None if is_last else neighbours[0])
        hidden = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if not hidden:
            return None
        passed = iter(_Input.apply(self, block, *hidden))
        return tuple(
            next(passed) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs
        )

    def _leave(
        self,
        block: Block,
        neighbours: Neighbours,
        _module: nn.Module,
        _inputs: tuple[object, ...],
        outputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """After a module has computed: its parameters can go, until its backward."""
        # Within a backward this is a recomputation, whose own backward follows at once.
        if not self._in_backward:
            block.release()
        if not any(output.requires_grad for output in outputs):
            return outputs
        return _Output.apply(self, block, neighbours[1], *outputs)

    def _fetch(self, block: Block, following: Block | None) -> None:
        block.ready()
        if following is not None:
            following.begin_gather()

    def before_block_backward(self, block: Block, following: Block | None) -> None:
        """The gradients of a block's outputs are complete."""
        self._fetch(block, following)
        block.begin_backward()

    def after_block_backward(self, block: Block) -> None:
        """The gradients of a block's inputs are complete, and with them those of its parameters."""
        if block.owes_reduction:
            self._reduce(block)
        block.release()


class _Input(torch.autograd.Function):
    """Identity whose backward comes after that of the whole block."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        engine: DataParallel,
        block: Block,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.engine, ctx.block = engine, block
        return tuple(x.view_as(x) for x in hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        ctx.engine.after_block_backward(ctx.block)
        return None, None, *grads


class _Output(torch.autograd.Function):
    """Identity whose backward comes before that of the whole block."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        engine: DataParallel,
        block: Block,
        following: Block | None,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.engine, ctx.block, ctx.following = engine, block, following
        return tuple(x.view_as(x) for x in hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        ctx.engine.before_block_backward(ctx.block, ctx.following)
        return None, None, None, *grads
