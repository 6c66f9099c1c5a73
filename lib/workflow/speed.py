"""Two ways of taking the same optimizer step, for comparing their speed.

The real one goes through the parallel layers' storage, ``fully_shard``, the executor, clipping
and the fused optimizer; the plain one is the loop that one would write by hand for one device:
the same model, ``loss.backward()``, ``clip_grad_norm_``, AdamW.
"""

import os
import socket
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lib.config.schema import ModelConfig
from lib.layers.attention import attention_backend
from lib.model.gpt import COMPUTE_DTYPES, GPTModel, ModelOptions, whole_model
from lib.model.initialization import initialize
from lib.optim.clipping import clip_gradients
from lib.optim.optimizer import build_optimizer, set_learning_rate
from lib.parallel.data_parallel import set_gradient_sync, shard_data_parallel
from lib.parallel.groups import ParallelGroups
from lib.parallel.mesh import build_mesh, data_mesh
from lib.parallel.storage import store_on_mesh
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import one_forward_one_backward

_RATE = 1e-4


class OneRank:
    """A process group of this process alone; gives the device."""

    def __enter__(self) -> torch.device:
        """Starts the group on a free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        has_gpu = torch.cuda.is_available()
        dist.init_process_group("nccl" if has_gpu else "gloo", rank=0, world_size=1)
        return torch.device("cuda" if has_gpu else "cpu")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the group."""
        dist.destroy_process_group()


def compared_steps(
    config: ModelConfig,
    *,
    compute: str,
    vocab_size: int,
    shape: tuple[int, int],
    micro_batches: int,
    device: torch.device,
) -> tuple[Callable[[], float], Callable[[], float]]:
    """The real step and the plain one, each ready to be called again; they give the loss.

    Args:
        config: the resolved ``model`` section.
        compute: ``fp32`` or ``bf16``.
        vocab_size: tokens are drawn from so many; a multiple of 128.
        shape: sequence length and micro batch size.
        micro_batches: forwards and backwards of a step.
        device: from ``OneRank``.
    """
    generator = torch.Generator().manual_seed(1)
    data = [
        torch.randint(vocab_size, (2, *shape), generator=generator).to(device)
        for _ in range(micro_batches)
    ]
    dtype = COMPUTE_DTYPES[compute]
    models = [_model(config, vocab_size, device) for _ in range(2)]
    return _real_step(models[0], data, dtype), _plain_step(models[1], data, dtype)


def _model(config: ModelConfig, vocab_size: int, device: torch.device) -> GPTModel:
    model = GPTModel(
        config,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend("auto")),
        part=whole_model(config),
    )
    initialize(model, config, vocab_size=vocab_size, seed=1)
    return model.to(device)


def _real_step(model: GPTModel, data: list[Tensor], dtype: torch.dtype) -> Callable[[], float]:
    mesh = build_mesh(data[0].device.type, tensor=1, pipeline=1, data=1)
    store_on_mesh(model, mesh["tp"])
    shard_data_parallel(model, model.layers.values(), data_mesh(mesh), dtype)
    parameters = dict(model.named_parameters())
    optimizer = _optimizer(list(parameters.values()))
    num_tokens = sum(tokens.numel() // 2 for tokens in data)

    def step() -> float:
        losses = run_plan(
            one_forward_one_backward(0, 1, len(data)),
            lambda _chunk, number, _received: model(data[number][0], data[number][1]).sum(),
            grad_scale=1.0 / num_tokens,
            before_backward=lambda _chunk, is_last: set_gradient_sync(
                model, "optimizer", is_last=is_last
            ),
        )
        clip_gradients(parameters.values(), 1.0, ParallelGroups())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(data[0].device)
        return float(sum(losses)) / num_tokens

    return step


def _plain_step(model: GPTModel, data: list[Tensor], dtype: torch.dtype) -> Callable[[], float]:
    optimizer = _optimizer(list(model.parameters()))
    device = data[0].device

    def step() -> float:
        total = 0.0
        for tokens, labels in data:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = model(tokens, labels).mean() / len(data)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(device)
        return total

    return step


def _optimizer(parameters: list[nn.Parameter]) -> AdamW:
    optimizer = build_optimizer(parameters, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    set_learning_rate(optimizer, _RATE)
    return optimizer


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
