"""Runs one configuration on several layouts and compares what comes out, number by number.

The promise: loss, gradients, gradient norm and updated weights do not depend on the layout. In
float64 they agree to rounding; a difference of 1e-9 is a fault in a layer, a schedule or a
reduction. In a lower precision the same comparison shows how much the order of sums matters.

Key biases are left out by name: softmax does not see them, so that their gradient is exactly zero
but for rounding noise, which AdamW turns into steps of full size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.config.launch_plan import layout_for
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.config.schema import ParallelConfig
from lib.train.local_ranks import rank_device, run_on_ranks
from lib.train.setup import TrainingParts, build_training
from lib.train.step import Progress, train_step

KEY_BIAS = "linear_qkv.k.bias"


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        losses: of each step, nats per token.
        norms: gradient norm of each step.
        gradients: of the first step, whole, by global name; on the CPU.
        weights: after the last step, likewise.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest relative differences of an outcome from the reference.

    Attributes:
        loss, norm: over all steps.
        gradient, weight: over all tensors, as |a - b| / |b| in the Euclidean norm, with the name
            of the worst tensor.
    """

    loss: float
    norm: float
    gradient: tuple[float, str]
    weight: tuple[float, str]

    def worst(self) -> float:
        """The largest of the four."""
        return max(self.loss, self.norm, self.gradient[0], self.weight[0])


def compare(outcome: Outcome, reference: Outcome) -> Difference:
    """How far an outcome is from the reference; an odd tensor is infinitely far."""
    return Difference(
        loss=_largest(outcome.losses, reference.losses),
        norm=_largest(outcome.norms, reference.norms),
        gradient=_farthest(outcome.gradients, reference.gradients),
        weight=_farthest(outcome.weights, reference.weights),
    )


def run_layout(
    config: RunConfig,
    runtime: RuntimeConfig,
    processes: int,
    steps: int,
    device: str = "cpu",
    timeout: float = 600.0,
) -> Outcome:
    """Trains for some steps on so many processes of this machine.

    Args:
        config: the run; ``config.parallel`` is the layout.
        runtime: recomputation and attention.
        processes: ranks to use.
        steps: optimizer steps to take.
        device: ``cpu`` or ``cuda``.
        timeout: seconds for all of it.
    """
    return run_layouts([config], runtime, processes, steps, device, timeout)[0]


def run_layouts(
    configs: Sequence[RunConfig],
    runtime: RuntimeConfig,
    processes: int,
    steps: int,
    device: str = "cpu",
    timeout: float = 600.0,
) -> list[Outcome]:
    """``run_layout`` of several layouts of one size, by the same processes: NCCL starts slowly."""
    assert device in ("cpu", "cuda")
    first, *_ = run_on_ranks(
        processes,
        train_each_on_rank,
        [config.to_json() for config in configs],
        runtime.model_dump_json(),
        steps,
        device,
        timeout=timeout,
        device=device,
    )
    outcomes = [outcome for outcome in first if outcome is not None]
    assert len(outcomes) == len(configs)
    return outcomes


def train_each_on_rank(
    config_texts: Sequence[str], runtime_text: str, steps: int, device: str
) -> list[Outcome | None]:
    """One rank's part of ``run_layouts``."""
    return [train_on_rank(text, runtime_text, steps, device) for text in config_texts]


def train_on_rank(config_text: str, runtime_text: str, steps: int, device: str) -> Outcome | None:
    """One rank's part for one layout; rank 0 gives the outcome."""
    config = RunConfig.model_validate_json(config_text)
    runtime = RuntimeConfig.model_validate_json(runtime_text)
    layout = layout_for(config, dist.get_world_size())
    parts = build_training(config, runtime, rank_device(device), layout)
    gradients: list[dict[str, Tensor]] = []
    progress = Progress()
    parts.model.chunks.train()

    def keep(loss_scale: float) -> None:
        gradients.append(_gradients(parts, loss_scale))

    rows = [train_step(parts, progress, keep if step == 0 else None) for step in range(steps)]
    parts.close()
    own = parts.model.own_parameters()
    weights = whole_tensors(parts, {name: p.detach() for name, p in own.items()})
    if dist.get_rank() != 0:
        return None
    return Outcome(
        [row.loss for row in rows], [row.grad_norm for row in rows], gradients[0], weights
    )


def with_layout(config: RunConfig, parallel: ParallelConfig) -> RunConfig:
    """The same run on another layout."""
    return config.model_copy(update={"parallel": parallel})


def _gradients(parts: TrainingParts, loss_scale: float) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in parts.model.own_parameters().items():
        assert parameter.grad is not None
        found[name] = parameter.grad / loss_scale
    return whole_tensors(parts, found)


def whole_tensors(parts: TrainingParts, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all stages' parameters, put together on rank 0 ({} elsewhere); all must call.

    By hand, from the ranks' pieces: it is what checks DTensor's own idea of how they are cut.
    """
    groups, cuts = parts.groups, parts.model.cuts
    shards = parts.config.parallel.data_shard or groups.dp.size
    pieces = {
        (name, groups.tp.rank, groups.dp.rank): (cuts[name].dim, _local(value).cpu())
        for name, value in mine.items()
        if groups.dp.rank < shards  # later ranks are replicas
    }
    gathered: list[dict[tuple[str, int, int], tuple[int | None, Tensor]]] = []
    if dist.get_rank() == 0:
        gathered = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(pieces, gathered or None)
    everything = {place: piece for theirs in gathered for place, piece in theirs.items()}
    names = dict.fromkeys(name for name, _, _ in everything)
    return {name: _join(name, everything, groups.tp.size, shards) for name in names}


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _join(
    name: str,
    everything: dict[tuple[str, int, int], tuple[int | None, Tensor]],
    tensor: int,
    shards: int,
) -> Tensor:
    """One whole tensor: data-parallel pieces are rows of the tensor-parallel parts."""
    dim, _ = everything[name, 0, 0]
    parts = [
        torch.cat([everything[name, tp_rank, dp_rank][1] for dp_rank in range(shards)])
        for tp_rank in range(tensor)
    ]
    if dim is not None:
        return torch.cat(parts, dim=dim)
    for part in parts[1:]:
        same = torch.allclose(part, parts[0], rtol=0, atol=0, equal_nan=True)
        assert same, f"{name}: its copies on the tensor-parallel ranks differ"
    return parts[0]


def _largest(values: list[float], reference: list[float]) -> float:
    assert len(values) == len(reference)
    return max(_relative(abs(a - b), abs(b)) for a, b in zip(values, reference, strict=True))


def _farthest(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    odd = found.keys() ^ reference.keys()
    if odd:
        return float("inf"), min(odd)
    return max(_distances(found, reference))


def _distances(
    found: dict[str, Tensor], reference: dict[str, Tensor]
) -> Iterator[tuple[float, str]]:
    for name, expected in reference.items():
        if name.endswith(KEY_BIAS):
            continue
        expected, actual = expected.double(), found[name].double()
        yield _relative((actual - expected).norm().item(), expected.norm().item()), name


def _relative(distance: float, size: float) -> float:
    """``distance / size``; what is no number is infinitely far, as nothing else would show it."""
    if not math.isfinite(distance) or not math.isfinite(size):
        return math.inf
    return distance / max(size, 1e-300)
