"""Builds everything a training run needs from its configuration, in reading order.

Nothing here decides anything: shapes, sizes and schedules come from the run configuration, the
layout from ``Layout``, and what a machine has from ``launch`` and ``runtime``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from lib.config.launch_plan import Layout
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.data.indexed_dataset import IndexedDataset
from lib.data.order import SampleOrder
from lib.data.samples import SampleWindows
from lib.data.splits import describe_splits
from lib.errors import UserError
from lib.layers.attention import attention_backend
from lib.model.flops import dense_peak_tflops, training_flops_per_token
from lib.model.gpt import COMPUTE_DTYPES, GPTModel, whole_model
from lib.model.initialization import initialize
from lib.model.loss import MicroBatch
from lib.optim.lr_schedule import LearningRate
from lib.optim.optimizer import build_optimizer
from lib.parallel.data_parallel import shard_data_parallel
from lib.parallel.groups import ParallelGroups
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.random import seed_streams
from lib.parallel.storage import store_on_mesh
from lib.train.batches import BatchShape, TrainingBatches, validation_batches
from lib.train.metrics import Throughput


@dataclass(frozen=True)
class TrainingParts:
    """What the loop works with.

    Attributes:
        config: the run configuration.
        runtime: logging and the like; changes no result.
        device: where this rank computes.
        groups: process groups of this rank.
        model: this rank's part of the model, sharded.
        parameters: its stored fp32 parameters by global name.
        optimizer: AdamW over them.
        learning_rate: rate by consumed samples.
        batches: micro batches of the training split.
        validation: micro batches of one validation, on the CPU; empty when it is off.
        shape: layout of the global batch.
        throughput: turns times into rates.
    """

    config: RunConfig
    runtime: RuntimeConfig
    device: torch.device
    groups: ParallelGroups
    model: GPTModel
    parameters: dict[str, nn.Parameter]
    optimizer: AdamW
    learning_rate: LearningRate
    batches: TrainingBatches
    validation: list[MicroBatch]
    shape: BatchShape
    throughput: Throughput


def start_process_group(device_type: str) -> torch.device:
    """Joins the other processes and takes this one's device.

    Args:
        device_type: ``cpu`` or ``cuda``, for which the launcher counted its processes.
    """
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # gloo beside NCCL: agreeing on a stop or a checkpoint must not wait for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def set_determinism(runtime: RuntimeConfig) -> None:
    """Chooses algorithms that give the same bits every time, where asked for."""
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)


def build_model(
    config: RunConfig, runtime: RuntimeConfig, groups: ParallelGroups, device: torch.device
) -> GPTModel:
    """The initialised fp32 model, whole and unsharded, on ``device``."""
    model = GPTModel(
        config.model,
        vocab_size=config.data.vocab_size,
        padded_vocab_size=config.derived.padded_vocab_size,
        groups=groups,
        core=attention_backend(runtime.attention),
        part=whole_model(config.model),
    )
    initialize(model, config.model, vocab_size=config.data.vocab_size, seed=config.training.seed)
    return model.to(device)


def open_split(config: RunConfig, name: Literal["train", "valid"]) -> SampleWindows:
    """The samples of one split of the tokenised corpus.

    Raises:
        UserError: when the tokens on disk are not those the configuration was made from.
    """
    dataset = IndexedDataset(Path(config.data.prefix))
    facts = describe_splits(dataset, config.training.split, config.training.seq_length)[name]
    expected = config.data.splits[name]
    if (facts.tokens, facts.samples) != (expected.tokens, expected.samples):
        raise UserError(
            f"{config.data.prefix}: the {name} split has {facts.tokens} tokens, but the run "
            f"configuration was made for {expected.tokens}; run validate_config again"
        )
    return SampleWindows(dataset, facts, config.training.seq_length)


def _learning_rate(config: RunConfig) -> LearningRate:
    schedule = config.schedule
    return LearningRate(
        max_lr=config.optimizer.lr,
        min_lr=schedule.min_lr,
        decay=schedule.decay,
        warmup_samples=schedule.warmup_samples,
        decay_samples=schedule.decay_samples,
        wsd_decay_samples=schedule.wsd_decay_samples,
        wsd_style=schedule.wsd_style,
    )


def _throughput(config: RunConfig, device: torch.device) -> Throughput:
    padded = config.derived.padded_vocab_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Throughput(
        samples_per_step=config.training.global_batch_size,
        tokens_per_step=config.derived.tokens_per_step,
        flops_per_token=training_flops_per_token(config.model, config.training.seq_length, padded),
        processes=dist.get_world_size(),
        peak_tflops=dense_peak_tflops(name),
    )


def _validation(config: RunConfig, shape: BatchShape) -> list[MicroBatch]:
    training = config.training
    if training.eval_interval == 0:
        return []
    windows = open_split(config, "valid")
    order = SampleOrder(windows.num_samples, training.seed, "valid")
    wanted = training.eval_iters * training.global_batch_size
    return validation_batches(windows, order, shape, wanted)


def build_training(
    config: RunConfig, runtime: RuntimeConfig, device: torch.device, layout: Layout
) -> TrainingParts:
    """Builds model, optimizer and data for this rank.

    Args:
        config: the run configuration.
        runtime: the ``runtime`` section.
        device: from ``start_process_group``.
        layout: how the processes share the work.
    """
    training = config.training
    mesh = build_mesh(device.type, tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data)
    groups = groups_of(mesh)
    shape = BatchShape(training.micro_batch_size, layout.micro_batches, groups.dp)
    assert shape.global_batch_size == training.global_batch_size
    seed_streams(training.seed, groups.dp.rank)
    model = build_model(config, runtime, groups, device)
    store_on_mesh(model, mesh["tp"])
    compute_dtype = COMPUTE_DTYPES[config.precision.compute]
    shard_data_parallel(model, model.layers.values(), mesh["dp"], compute_dtype)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(
        list(parameters.values()),
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        epsilon=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
    )
    windows = open_split(config, "train")
    order = SampleOrder(windows.num_samples, training.seed)
    return TrainingParts(
        config=config,
        runtime=runtime,
        device=device,
        groups=groups,
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        learning_rate=_learning_rate(config),
        batches=TrainingBatches(windows, order, shape, device, runtime.prefetch),
        validation=_validation(config, shape),
        shape=shape,
        throughput=_throughput(config, device),
    )
