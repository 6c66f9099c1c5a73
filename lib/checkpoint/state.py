"""What a checkpoint holds: which tensors make up the state of a run, and under which names.

    model.NAME                     fp32 master parameters
    optimizer.exp_avg.NAME         AdamW's moments
    optimizer.exp_avg_sq.NAME
    random.rank_00000.cpu, .cuda   state of torch's generators, one for each rank
    random.rank_00000.shard        that of the stream of its tensor-parallel shard, where it has one

NAME is the model's global parameter name, the same in every layout; a sharded parameter is a
DTensor and its moments are sharded alike. The tensors given here share memory with the model and
the optimizer: loading is in place, and a save in the background copies them first
(``lib.checkpoint.background``).

Everything else is JSON, in the checkpoint's ``state.json`` under ``scalars``; a training run
(``lib.train.run_state``) writes:

    progress         iteration, consumed samples, skipped and bad steps (``lib.train.step``)
    data             consumed_samples, the whole state of the data order; what follows from it:
                     segment, the phase that the run is in, and draws, samples of each corpus
    tokens_seen      consumed samples times the sequence length of each phase
    metrics          rows: rows of history.jsonl up to this iteration, one a kind and iteration
    optimizer_step   AdamW's step count; rates and decay come from the configuration, never from a
                     checkpoint
    loss_scale       the scale and its counters
    random_streams   the rank grid and device on which the random tensors can be continued
    arithmetic       layout and choices that change the last digits of a step, measured ones
                     (attention) included; a resume takes these again and says which differ
    run_config       the whole run configuration
    versions         of Python and of each installed package
    git_commit       of the project; null outside git

A resume compares consumed samples, tokens and rows with the history and says where they differ.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lib.checkpoint.metadata import RANK_PREFIX
from lib.layers.attention import backend_name
from lib.parallel.random import RandomStream

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "optimizer_step"


def training_tensors(
    named_parameters: Iterable[tuple[str, nn.Parameter]], optimizer: AdamW
) -> dict[str, Tensor]:
    """Parameters and moments under their names in a checkpoint.

    A fresh optimizer's moments are created (zeros, as its first step would), so that the same
    call serves to save and to load. To save, leave copies of another stage's parameters out.
    """
    tensors: dict[str, Tensor] = {}
    parameters = dict(named_parameters)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert held >= set(parameters.values()), "the optimizer is another model's"
    _create_moments(optimizer)
    for name, parameter in parameters.items():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"optimizer.{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def attention_of(arithmetic: Mapping[str, object]) -> str | None:
    """The attention backend that a checkpoint's run was computed with; None if it does not say.

    Args:
        arithmetic: of its scalars. ``auto`` is of a time when that always was ``sdpa``.
    """
    name = arithmetic.get("runtime.attention")
    return backend_name(name) if isinstance(name, str) else None


def optimizer_scalars(optimizer: AdamW) -> dict[str, object]:
    """The optimizer's step count, for the scalars of a checkpoint."""
    steps = {int(state["step"].item()) for state in optimizer.state.values()}
    assert len(steps) <= 1, "parameters have taken different numbers of steps"
    return {_STEP: steps.pop() if steps else 0}


def restore(optimizer: AdamW, scalars: Mapping[str, object]) -> None:
    """Sets the step count, once the tensors of `training_tensors` were filled in place."""
    step = scalars[_STEP]
    assert isinstance(step, int)
    _create_moments(optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(step)


def random_streams(
    rank: int, device: torch.device, shard_stream: RandomStream | None = None
) -> dict[str, Tensor]:
    """The state of the streams this rank draws from, under names of this rank alone.

    Ranks draw different numbers, so one rank's stream must never serve another: restore them
    only where the rank grid and the kind of device are those of the save, and derive them from
    the seed otherwise.
    """
    prefix = f"{RANK_PREFIX}rank_{rank:05d}."
    streams = {f"{prefix}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        streams[f"{prefix}cuda"] = torch.cuda.get_rng_state(device)
    if shard_stream is not None:
        streams[f"{prefix}shard"] = shard_stream.state
    return streams


def restore_random_streams(
    tensors: Mapping[str, Tensor],
    rank: int,
    device: torch.device,
    shard_stream: RandomStream | None = None,
) -> None:
    """Sets this rank's streams from loaded tensors named by `random_streams`."""
    prefix = f"{RANK_PREFIX}rank_{rank:05d}."
    torch.set_rng_state(tensors[f"{prefix}cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{prefix}cuda"], device)
    if shard_stream is not None:
        shard_stream.state = tensors[f"{prefix}shard"]


def _create_moments(optimizer: AdamW) -> None:
    """Gives an optimizer that has not stepped yet the state that its first step would create."""
    for group in optimizer.param_groups:
        assert not group["amsgrad"]
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state:
                continue
            device = parameter.device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(
                    parameter.detach(), memory_format=torch.preserve_format
                )
