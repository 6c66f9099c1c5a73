"""An optimizer step as one writes it by hand: a loop over micro batches, clipping, AdamW."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from lib.config.schema import ModelConfig, OptimizerConfig
from lib.workflow.plain_model import PlainModel

Batch = Sequence[tuple[Tensor, Tensor]]

# In this order: cuDNN's is the fastest at the lengths that are measured.
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class PlainSteps:
    """Steps over successive batches.

    Args:
        model: gives the mean loss of (tokens, labels), both int64 [B, S]. Its weights have the
            dtype that it computes in: there is no second copy of them.
        batches: the micro batches of each step.
        options: rates; the learning rate is that of ``lr`` throughout.
    """

    def __init__(
        self, model: nn.Module, batches: Iterator[Batch], options: OptimizerConfig
    ) -> None:
        self._model = model
        self._batches = batches
        self._clip = options.clip_grad
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        betas = (options.beta1, options.beta2)
        self._optimizer = AdamW(groups, options.lr, betas, options.epsilon, fused=True)

    def __call__(self) -> Tensor:
        """Takes the next step; gives the mean loss before it, nats per token, and does not wait."""
        micro_batches = next(self._batches)
        losses: list[Tensor] = []
        for tokens, labels in micro_batches:
            loss = self._model(tokens, labels) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
        if self._clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()


def compiled_plain_steps(
    config: ModelConfig,
    vocab_size: int,
    shape: tuple[int, int, int],
    options: OptimizerConfig,
    device: torch.device,
) -> Callable[[], Tensor]:
    """Steps of the compiled plain model in bf16, with random weights, on random tokens.

    Args:
        config: the resolved ``model`` section.
        vocab_size: tokens are drawn from so many.
        shape: micro batches, samples in each, and tokens of a sample.
        options: rates.
        device: a GPU; elsewhere nothing is compiled and the weights are fp32.
    """
    on_gpu = device.type == "cuda"
    with device:
        model = PlainModel(config, vocab_size)
        model.draw()
    if on_gpu:
        for parameter in model.parameters():  # the rotary table stays fp32
            parameter.data = parameter.data.bfloat16()
        model.compile_parts()
    generator = torch.Generator(device).manual_seed(1)
    micro_batches, *each = shape

    def batches() -> Iterator[Batch]:
        while True:
            tokens = [
                torch.randint(
                    vocab_size, (each[0], each[1] + 1), generator=generator, device=device
                )
                for _ in range(micro_batches)
            ]
            yield [(windows[:, :-1], windows[:, 1:]) for windows in tokens]

    steps = PlainSteps(model, batches(), options)

    def step() -> Tensor:
        with sdpa_kernel(_ATTENTION, set_priority=True) if on_gpu else nullcontext():
            return steps()

    return step
