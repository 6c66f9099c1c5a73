"""The attention backend of a run: named, the one it began with, or the fastest on its GPUs.

All ranks take the same one: a backend counts only if it can serve on every rank, rank 0 times those
that can, and its word goes to the others. The name is kept in the checkpoints (``arithmetic``), so
that a run that was interrupted goes on with the bits of the one that was not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from lib.checkpoint.loading import LoadedCheckpoint
from lib.checkpoint.ranks import gather, on_rank_zero, rank_and_size
from lib.checkpoint.state import attention_of
from lib.config.operation import RuntimeConfig
from lib.config.run_config import RunConfig
from lib.console import say, warn
from lib.errors import UserError
from lib.layers.attention import BACKENDS
from lib.layers.attention_choice import (
    Measured,
    Timer,
    kept_bytes,
    measure,
    obstacle,
    time_on_gpu,
)
from lib.layers.attention_limits import AttentionCase
from lib.layers.gpu_limits import Capability
from lib.train.attention_rules import attention_cases

# Of a GPU's memory, that the S x S weights of all layers may take under a backend that keeps them.
_SHARE_FOR_WEIGHTS = 0.1


@dataclass(frozen=True)
class Wanted:
    """What a run asks of its attention.

    Attributes:
        name: ``runtime.attention``.
        cases: the shapes of one rank, each with the micro batches that a run computes of it.
        layers: whose kept weights one rank holds at once.
        before: the backend that the run was computed with so far; None if it begins, or if that
            was on another kind of device.
    """

    name: str
    cases: dict[AttentionCase, float]
    layers: int
    before: str | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank computes.

    Attributes:
        capability: compute capability of its GPU; None on a CPU.
        title: name of the GPU.
        memory: bytes of the GPU.
        time: times a backend there.
    """

    capability: Capability = None
    title: str = "CPU"
    memory: int = 0
    time: Timer = field(default=lambda _name, _case: 0.0)


def with_chosen_attention(
    runtime: RuntimeConfig,
    config: RunConfig,
    device: torch.device,
    found: LoadedCheckpoint | None,
) -> RuntimeConfig:
    """``runtime`` with the name of a backend in ``attention``; called by all ranks.

    Args:
        runtime: as configured.
        config: the run configuration.
        device: of this rank.
        found: the checkpoint that the run goes on from.

    Raises:
        UserError: ``runtime.attention`` names a backend that cannot serve.
    """
    before = None
    if found is not None:
        arithmetic = found.scalars["arithmetic"]
        assert isinstance(arithmetic, dict)
        before = attention_of(arithmetic) if arithmetic.get("device") == device.type else None
    in_flight = 1 if runtime.recompute != "none" else config.model.num_layers
    wanted = Wanted(runtime.attention, _cases(config, runtime), in_flight, before)
    chosen = choose_attention(wanted, _place(device))
    return runtime.model_copy(update={"attention": chosen})


def choose_attention(wanted: Wanted, place: Place) -> str:
    """The backend that all ranks take; called by all of them.

    Raises:
        UserError: on every rank, if the one that is asked for cannot serve.
    """
    if wanted.name != "auto":
        _require(wanted, place)
        return wanted.name
    if wanted.before is not None:
        reason = _obstacle(wanted.before, wanted, place)
        if reason is None:
            if place.capability is not None:
                _on_first(say, f"attention: {wanted.before}, as this run was computed so far")
            return wanted.before
        _on_first(
            warn,
            f"attention: {wanted.before}, by which this run was computed so far, {reason}; another "
            "is taken, so the run will differ in the last digits",
        )
    if place.capability is None:
        return "sdpa"
    return _fastest(wanted, place)


def _cases(config: RunConfig, runtime: RuntimeConfig) -> dict[AttentionCase, float]:
    """The shapes of all phases, weighted by their micro batches."""
    phases = config.data.phases
    ends = [*(phase.from_samples for phase in phases[1:]), config.training.train_samples]
    cases: dict[AttentionCase, float] = {}
    every = attention_cases(config, runtime)
    for phase, end, case in zip(phases, ends, every, strict=True):
        micro_batches = max(1, end - phase.from_samples) / phase.micro_batch_size
        cases[case] = cases.get(case, 0.0) + micro_batches
    return cases


def _place(device: torch.device) -> Place:
    if device.type != "cuda":
        return Place()
    found = torch.cuda.get_device_properties(device)
    return Place(
        torch.cuda.get_device_capability(device),
        found.name,
        found.total_memory,
        partial(time_on_gpu, device=device),
    )


def _require(wanted: Wanted, place: Place) -> None:
    reason = _obstacle(wanted.name, wanted, place)
    if reason is None:
        return
    others = _obstacles([name for name in BACKENDS if name != wanted.name], wanted, place)
    serving = ", ".join(name for name, fault in others.items() if fault is None)
    raise UserError(
        f"runtime.attention = {wanted.name}: it {reason}; write auto, or one that can serve this "
        f"run: {serving}"
    )


def _obstacles(names: Sequence[str], wanted: Wanted, place: Place) -> dict[str, str | None]:
    """Why backends cannot serve on one of the ranks, by name, as far as is known beforehand."""
    mine = {name: obstacle(name, wanted.cases, place.capability) for name in names}
    everyones = gather(mine)
    return {
        name: next((theirs[name] for theirs in everyones if theirs[name] is not None), None)
        for name in names
    }


def _obstacle(name: str, wanted: Wanted, place: Place) -> str | None:
    """Why a backend cannot serve, known beforehand or seen when rank 0 tries; None if it can."""
    reason = _obstacles([name], wanted, place)[name]
    if reason is not None or place.capability is None:
        return reason
    failed = on_rank_zero(lambda: measure([name], wanted.cases, place.time).failed)
    return failed.get(name)


def _fastest(wanted: Wanted, place: Place) -> str:
    """The backend that is the fastest on rank 0, among those that can serve on all ranks."""
    candidates = [name for name, backend in BACKENDS.items() if backend.is_candidate]
    reasons = _obstacles(candidates, wanted, place)
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    serving = [name for name in candidates if name not in left_out]
    measured = on_rank_zero(lambda: _measured(serving, wanted, place))
    faults = left_out | measured.failed
    told = "; ".join(f"{name} {reason}" for name, reason in faults.items())
    if not measured.milliseconds:
        raise UserError(
            f"runtime.attention = auto: no backend runs on this GPU ({told}); see whether torch "
            "fits the driver"
        )
    chosen = next(iter(measured.milliseconds))
    times = ", ".join(f"{name} {ms:.3g}" for name, ms in measured.milliseconds.items())
    _on_first(
        say,
        f"attention: {chosen}, the fastest on {place.title} (ms for a layer and a micro batch, "
        f"forward and backward: {times})" + (f"; left out: {told}" if told else ""),
    )
    return chosen


def _measured(names: Sequence[str], wanted: Wanted, place: Place) -> Measured:
    """Times backends, but not those that would keep too much memory in training."""
    limit = _SHARE_FOR_WEIGHTS * place.memory / wanted.layers
    kept = {name: max(kept_bytes(name, case) for case in wanted.cases) for name in names}
    measured = measure([name for name in names if kept[name] <= limit], wanted.cases, place.time)
    too_much = {
        name: f"would keep {size * wanted.layers / 2**30:.3g} GiB for the backward pass"
        for name, size in kept.items()
        if size > limit
    }
    return Measured(measured.milliseconds, too_much | measured.failed)


def _on_first(write: Callable[[str], None], text: str) -> None:
    if rank_and_size()[0] == 0:
        write(text)
