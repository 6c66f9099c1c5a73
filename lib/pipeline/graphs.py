"""Micro batches by CUDA graphs: the kernels of a forward or a backward are launched all at once.

A launch takes the host several microseconds, a collective ten times as many. Where the kernels are
shorter than that, the host sets the pace. A graph is recorded once and started by one call.

What is recorded reads and writes fixed memory, so inputs are copied in and results copied out, and
what the forward keeps for the backward stays until that backward: micro batches that are under way
at the same time need a recording each (a slot), with memory of its own. A recording serves one
chunk of layers, one shape of inputs and one state of everything that the host decides.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# From input tensors and the hidden states of the chunk before (or None) to a chunk's output.
Compute = Callable[[Sequence[Tensor], Tensor | None], Tensor]


class Recording(Protocol):
    """A forward and its backward that can be repeated, in turns."""

    def forward(self, inputs: Sequence[Tensor], received: Tensor | None) -> Tensor:
        """The output for new inputs of the same shapes, in memory of its own."""
        ...

    def backward(self, gradient: Tensor) -> Tensor | None:
        """The gradient of what was received, from that of the latest output."""
        ...

    def release(self) -> None:
        """Lets go of what was recorded."""
        ...


class CudaGraphs:
    """A recording by CUDA graphs; nothing is computed while it is made.

    Args:
        compute: what to record; it must have run before, since what happens once only (kernels
            that are compiled, communicators that connect) cannot be recorded. Gradients of
            parameters are added to the ``grad`` that these have.
        inputs: of the shapes to come, on the GPU.
        received: likewise, or None.
    """

    def __init__(self, compute: Compute, inputs: Sequence[Tensor], received: Tensor | None) -> None:
        self._inputs = [x.clone() for x in inputs]
        self._received: Tensor | None = None
        if received is not None:
            self._received = received.detach().clone().requires_grad_()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        # Threads that read batches ahead may ask for memory in the meantime.
        with torch.cuda.graph(self._forward, pool, capture_error_mode="thread_local"):
            output = compute(self._inputs, self._received)
        self._output = output.detach()
        self._gradient = torch.zeros_like(self._output)
        with torch.cuda.graph(self._backward, pool, capture_error_mode="thread_local"):
            torch.autograd.backward(output, self._gradient)

    def forward(self, inputs: Sequence[Tensor], received: Tensor | None) -> Tensor:
        """See ``Recording``."""
        torch._foreach_copy_(self._inputs, list(inputs))
        if self._received is not None:
            assert received is not None
            self._received.detach().copy_(received)
        self._forward.replay()
        return self._output.clone()

    def backward(self, gradient: Tensor) -> Tensor | None:
        """See ``Recording``."""
        self._gradient.copy_(gradient)
        self._backward.replay()
        if self._received is None:
            return None
        assert self._received.grad is not None
        return self._received.grad.clone()

    def release(self) -> None:
        """See ``Recording``."""
        self._forward.reset()
        self._backward.reset()


class Replayed:
    """The forwards of one chunk, recorded when they are first needed.

    Args:
        compute: what to record.
        record: makes a recording, as ``CudaGraphs`` does.
    """

    def __init__(
        self,
        compute: Compute,
        record: Callable[[Compute, Sequence[Tensor], Tensor | None], Recording] = CudaGraphs,
    ) -> None:
        self._compute, self._record = compute, record
        self._made: list[Recording] = []
        self._free: list[Recording] = []

    def __call__(self, inputs: Sequence[Tensor], received: Tensor | None) -> Tensor:
        """The chunk's output, with a graph that leads to the recorded backward.

        Args:
            inputs: tensors of the same shapes as ever, without gradients.
            received: hidden states of the chunk before, a leaf that gets a gradient; or None.
        """
        if not self._free:
            self._made.append(self._record(self._compute, inputs, received))
            self._free.append(self._made[-1])
        recording = self._free.pop()
        # Autograd goes to the backward only if something here wants a gradient.
        wanting = torch.empty(0, requires_grad=True) if received is None else received
        return _Replay.apply(recording, self._free, inputs, wanting)

    def release(self) -> None:
        """Lets go of all recordings, also of what a step that broke off was using."""
        for recording in self._made:
            recording.release()
        self._made.clear()
        self._free.clear()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        recording: Recording,
        free: list[Recording],
        inputs: Sequence[Tensor],
        received: Tensor,
    ) -> Tensor:
        ctx.recording, ctx.free = recording, free
        return recording.forward(inputs, received if received.numel() else None)

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        gradient = ctx.recording.backward(grads[0])
        ctx.free.append(ctx.recording)
        return None, None, None, gradient
