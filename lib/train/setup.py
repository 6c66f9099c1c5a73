"""Builds everything a training run needs from its configuration, in reading order.

Nothing here decides anything: shapes, sizes and schedules come from the run configuration, the
layout from ``Layout``, and what a machine has from ``launch`` and ``runtime``.
"""

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from lib.checkpoint.run_data import open_samples, training_samples
from lib.config.batch_schedule import BatchSchedule
from lib.config.launch_plan import Layout
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.console import warn
from lib.data.order import SampleOrder
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.model.flops import dense_peak_tflops, training_flops_per_token
from lib.model.initialization import initial_parts
from lib.model.loss import SampleRules
from lib.optim.grad_scaler import LossScale, ScaleRules, build_loss_scale
from lib.optim.lr_schedule import LearningRate
from lib.optim.optimizer import build_optimizer
from lib.parallel.groups import ParallelGroups
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.monitor import watch_groups
from lib.parallel.random import seed_default_stream, shard_stream
from lib.pipeline.communication import Links
from lib.train.batches import (
    BatchShape,
    Reading,
    TrainingBatches,
    ValidationSet,
    validation_set,
)
from lib.train.graphs import StepGraphs, graphs_obstacle
from lib.train.metrics import Throughput
from lib.train.model_setup import Draw, ShardedModel, build_sharded_model


@dataclass(frozen=True)
class PhaseParts:
    """What depends on the lengths of a phase.

    Attributes:
        links: to the neighbouring pipeline stages, for hidden states of its shape.
        throughput: turns times into rates.
    """

    links: Links
    throughput: Throughput


@dataclass(frozen=True)
class TrainingParts:
    """What the loop works with.

    Attributes:
        config: the run configuration.
        runtime: logging and the like; changes no result.
        device: where this rank computes.
        groups: process groups of this rank.
        model: this rank's part of the model, sharded.
        optimizer: AdamW over the model's parameters.
        loss_scale: factor on the loss before the backward pass, for fp16.
        learning_rate: rate by consumed samples.
        order: in which training reads the corpora.
        batches: micro batches of training.
        validation: what a validation measures; empty when it is off.
        shape: sizes of the global batches and their layout.
        phases: what depends on lengths, for each phase of the training.
        graphs: how the forwards of a step run.
    """

    config: RunConfig
    runtime: RuntimeConfig
    device: torch.device
    groups: ParallelGroups
    model: ShardedModel
    optimizer: AdamW
    loss_scale: LossScale
    learning_rate: LearningRate
    order: SampleOrder
    batches: TrainingBatches
    validation: tuple[ValidationSet, ...]
    shape: BatchShape
    phases: tuple[PhaseParts, ...]
    graphs: StepGraphs

    @property
    def is_last_stage(self) -> bool:
        """Whether this pipeline stage holds the loss."""
        return self.groups.pp.rank == self.groups.pp.size - 1

    def close(self) -> None:
        """Before the process groups end: ends the readers, and lets go of recorded graphs.

        A process group does not end while graphs that its calls are recorded in are there
        (github.com/pytorch/pytorch/issues/115388).
        """
        self.batches.close()
        self.graphs.release()

    def at(self, consumed_samples: int) -> PhaseParts:
        """What the step that begins after ``consumed_samples`` works with."""
        return self.phases[self.config.data.phase_index_at(consumed_samples)]


def set_nccl_defaults() -> None:
    """Before NCCL's first call: what is otherwise than usual, unless somebody set it.

    NCCL registers the buffers of recorded collectives, which saves a copy. Replays with registered
    buffers have hung (github.com/NVIDIA/nccl/issues/2389).
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


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
    set_nccl_defaults()
    # gloo beside NCCL: agreeing on a stop or a checkpoint must not wait for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def set_determinism(runtime: RuntimeConfig) -> None:
    """Chooses algorithms that give the same bits every time, where asked for."""
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)


def build_groups(config: RunConfig, device: torch.device, mesh: DeviceMesh) -> ParallelGroups:
    """The groups of this rank, with everything that layers ask of them."""
    groups = groups_of(mesh)
    stream = None
    if groups.tp.size > 1:
        stream = shard_stream(
            config.training.seed,
            device,
            dp_rank=groups.dp.rank,
            pp_rank=groups.pp.rank,
            tp_rank=groups.tp.rank,
        )
    return replace(groups, sequence_parallel=config.parallel.sequence, shard_stream=stream)


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


def _loss_scale(config: RunConfig) -> LossScale:
    precision = config.precision
    rules = ScaleRules(
        initial=precision.initial_loss_scale,
        minimum=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.loss_scale_hysteresis,
    )
    return build_loss_scale(precision.compute, precision.loss_scale, rules)


def _throughput(config: RunConfig, seq_length: int, device: torch.device) -> Throughput:
    padded = config.derived.padded_vocab_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Throughput(
        tokens_per_sample=seq_length,
        flops_per_token=training_flops_per_token(config.model, seq_length, padded),
        processes=dist.get_world_size(),
        peak_tflops=dense_peak_tflops(name),
    )


def _reading(
    config: RunConfig, runtime: RuntimeConfig, groups: ParallelGroups, device: torch.device
) -> Reading:
    return Reading(
        SampleRules.of(config.data),
        device,
        reads_tokens=groups.pp.rank in (0, groups.pp.size - 1),
        num_workers=runtime.num_workers,
        prefetch=runtime.prefetch,
    )


def _validation(
    config: RunConfig, shape: BatchShape, reading: Reading
) -> tuple[ValidationSet, ...]:
    training = config.training
    if training.eval_interval == 0:
        return ()
    wanted = training.eval_iters * training.global_batch_size
    return tuple(
        validation_set(
            name,
            open_samples(config, name, "valid", training.seq_length),
            training.seed,
            wanted,
            (shape, reading),
        )
        for name in config.data.validation
    )


def _agents_store() -> dist.Store:
    """A connection of its own to the key-value store that torchrun keeps for the workers."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("collectives", dist.TCPStore(address, port, is_master=False))


def _phases(
    config: RunConfig, groups: ParallelGroups, device: torch.device
) -> tuple[PhaseParts, ...]:
    """The links of all phases share their connections, which are made once."""
    links = Links(
        groups.channels,
        stage=groups.pp.rank,
        stages=groups.pp.size,
        chunks=config.parallel.virtual_stages,
        dtype=COMPUTE_DTYPES[config.precision.compute],
        device=device,
        stream=torch.cuda.Stream(device) if device.type == "cuda" else None,
    )
    links.connect()
    cut = groups.tp.size if groups.sequence_parallel else 1
    return tuple(
        PhaseParts(
            replace(
                links,
                shape=(phase.seq_length // cut, phase.micro_batch_size, config.model.hidden_size),
            ),
            _throughput(config, phase.seq_length, device),
        )
        for phase in config.data.phases
    )


def build_training(
    config: RunConfig,
    runtime: RuntimeConfig,
    device: torch.device,
    layout: Layout,
    debug: Literal["collectives"] | None = None,
    draw: Draw = initial_parts,
) -> TrainingParts:
    """Builds model, optimizer and data for this rank.

    Args:
        config: the run configuration.
        runtime: the ``runtime`` section.
        device: from ``start_process_group``.
        layout: how the processes share the work.
        debug: ``launch.debug``.
        draw: gives the initial values, as ``initial_parts`` does.
    """
    training = config.training
    mesh = build_mesh(
        device.type,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        data_shard=layout.data_shard,
    )
    groups = build_groups(config, device, mesh)
    if debug == "collectives":
        groups = watch_groups(groups, _agents_store(), report=warn)
    seed_default_stream(training.seed, dp_rank=groups.dp.rank, pp_rank=groups.pp.rank)
    model = build_sharded_model(config, runtime, groups, mesh, draw)
    optimizer = build_optimizer(
        list(model.parameters.values()),
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        epsilon=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
    )
    shape = BatchShape(config.data.phases, BatchSchedule.of(training), groups.dp)
    reading = _reading(config, runtime, groups, device)
    samples = training_samples(config)
    return TrainingParts(
        config=config,
        runtime=runtime,
        device=device,
        groups=groups,
        model=model,
        optimizer=optimizer,
        loss_scale=_loss_scale(config),
        learning_rate=_learning_rate(config),
        order=samples.order,
        batches=TrainingBatches(samples, shape, reading),
        validation=_validation(config, shape, reading),
        shape=shape,
        phases=_phases(config, groups, device),
        graphs=StepGraphs(
            model,
            graphs_obstacle(config, runtime, groups, device),
            shares_state=groups.dp.size > 1,
        ),
    )
