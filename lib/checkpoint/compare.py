"""What differs between two checkpoints, and what a run under other parameters would make of one."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from lib.checkpoint.fingerprint import difference, fingerprint, fingerprint_parts, leaves
from lib.checkpoint.inspect import CheckpointFacts, TensorFacts, TensorReader
from lib.checkpoint.state import attention_of
from lib.config.data_facts import DataFacts
from lib.config.data_section import blended_names, planned_phases, validation_names
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.params_file import ParamsFile
from lib.config.rules import broken_rules
from lib.config.run_config import InitialWeights, Params, RunConfig, resolve
from lib.errors import InvalidParams, UserError

# Entries compared at once, in float64: 64 MB a tensor, however large it is.
_PIECE = 1 << 22

Verdict = Literal["only in the first", "only in the second", "shape", "dtype", "values", "equal"]


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between two checkpoints.

    Attributes:
        name: of the tensor.
        verdict: the first of these that is true; ``equal`` is bit for bit.
        detail: shapes or dtypes where they differ.
        absolute: largest difference of two entries; None unless the values differ.
        relative: the same over the largest magnitude in the first.
    """

    name: str
    verdict: Verdict
    detail: str = ""
    absolute: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class LoadPreview:
    """What a run under a parameter file would do with a checkpoint.

    Attributes:
        fingerprint: the state directory of that run.
        another_run: fields of the fingerprint that differ; if any, the run starts fresh.
        continues_with: fields that may differ in a run that continues.
        not_bit_for_bit: why the continued run differs in the last digits.
        length: how the run's end lies to the checkpoint, where that needs a word; of another run,
            how it goes on from this state, if it differs by later phases only.
    """

    fingerprint: str
    another_run: list[str]
    continues_with: list[str]
    not_bit_for_bit: list[str]
    length: str


def scalar_differences(a: CheckpointFacts, b: CheckpointFacts) -> list[str]:
    """Configuration, layout, versions and all other scalars that differ, a line for each."""
    return difference(a.scalars, b.scalars)


def tensor_differences(a: CheckpointFacts, b: CheckpointFacts) -> Iterator[TensorDifference]:
    """Compares all tensors of two checkpoints, each read by itself.

    Raises:
        UserError: a tensor cannot be read.
    """
    first, second = TensorReader(a.path), TensorReader(b.path)
    of_a = {tensor.name: tensor for tensor in a.tensors}
    of_b = {tensor.name: tensor for tensor in b.tensors}
    for name in sorted(of_a.keys() | of_b.keys()):
        if name not in of_b:
            yield TensorDifference(name, "only in the first")
        elif name not in of_a:
            yield TensorDifference(name, "only in the second")
        elif unlike := _unlike(of_a[name], of_b[name]):
            yield unlike
        else:
            yield compare_values(name, first.read(name), second.read(name))


def most_different(differences: Sequence[TensorDifference]) -> list[TensorDifference]:
    """Those without a number first, then by the relative difference of their values."""

    def smallness(tensor: TensorDifference) -> float:
        relative = math.inf if tensor.relative is None else tensor.relative
        return -math.inf if math.isnan(relative) else -relative

    return sorted(differences, key=smallness)


def _unlike(a: TensorFacts, b: TensorFacts) -> TensorDifference | None:
    if a.shape != b.shape:
        return TensorDifference(a.name, "shape", f"{list(a.shape)} -> {list(b.shape)}")
    if a.dtype != b.dtype:
        return TensorDifference(a.name, "dtype", f"{a.dtype} -> {b.dtype}")
    return None


def compare_values(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Compares two tensors of one shape and dtype: their bits, else their values in float64."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    if torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)):
        return TensorDifference(name, "equal")
    absolute, largest = torch.zeros(()).double(), torch.zeros(()).double()
    for piece_a, piece_b in zip(flat_a.split(_PIECE), flat_b.split(_PIECE), strict=True):
        x, y = piece_a.double(), piece_b.double()
        # Equal infinities differ by nothing; maximum keeps a NaN, which max of floats would not.
        gap = torch.where(x == y, 0.0, (x - y).abs())
        absolute = torch.maximum(absolute, gap.max())
        largest = torch.maximum(largest, x.abs().max())
    relative = float(absolute / largest) if largest > 0 else float("inf")
    return TensorDifference(name, "values", absolute=float(absolute), relative=relative)


def recorded_config(facts: CheckpointFacts) -> RunConfig:
    """The run configuration that a checkpoint was saved under.

    Raises:
        UserError: it is not recorded, or is another version's.
    """
    saved = facts.scalar("run_config")
    if saved is None:
        raise UserError(f"{facts.path}: its run configuration is not recorded")
    try:
        return RunConfig.model_validate_json(json.dumps(saved), strict=True)
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
        place = ".".join(map(str, error["loc"]))
        raise UserError(
            f"{facts.path}: its run configuration is another version's ({place}: {error['msg']})"
        ) from None


def preview(facts: CheckpointFacts, params_file: ParamsFile, data: DataFacts | None) -> LoadPreview:
    """What a run under ``params_file`` would do with a checkpoint.

    Args:
        facts: of the checkpoint.
        params_file: the parameters, as written.
        data: the tokenised corpora; None takes those of the checkpoint.

    Raises:
        UserError: the parameters are not sound, or the checkpoint does not say enough.
    """
    saved = recorded_config(facts)
    params, runtime, launch = _sections(params_file)
    initial = _initial(params.training.initial_weights, saved.initial)
    known = data or saved.data
    _require_corpora(params, known)
    now = resolve(params, known, initial)
    another_run = difference(fingerprint_parts(saved), fingerprint_parts(now))
    told = {line.partition(":")[0] for line in another_run}
    others = difference(saved.model_dump(mode="json"), now.model_dump(mode="json"))
    return LoadPreview(
        fingerprint(now),
        another_run,
        [line for line in others if not _is_implied(line.partition(":")[0], told)],
        [] if another_run else _not_bit_for_bit(facts, now, runtime, launch),
        _added_phases(saved, now) if another_run else _length(facts, now),
    )


def _sections(params_file: ParamsFile) -> tuple[Params, RuntimeConfig, LaunchConfig]:
    """The sections that count here, checked against each other."""
    params = Params.from_file(params_file)
    sections = {name: section for name, section in vars(params).items() if section is not None}
    if problems := broken_rules(sections):
        raise InvalidParams(problems)
    runtime = params_file.section("runtime", RuntimeConfig)
    return params, runtime, params_file.section("launch", LaunchConfig)


def _require_corpora(params: Params, known: DataFacts) -> None:
    """Refuses parameters under which corpora are read, or cut, as they are not in ``known``."""
    corpora = known.trained if params.corpora is None else params.corpora
    blended = blended_names(planned_phases(params.training, params.data), corpora)
    unknown = {*blended} - {*known.trained}
    unknown |= {*validation_names(params.data, blended)} - known.corpora.keys()
    if unknown:
        raise UserError(
            f"the tokens of {', '.join(sorted(unknown))} are not described yet, or not as the "
            "section data wants them; run: dvc repro validate_config"
        )


def _initial(written: str | None, saved: InitialWeights) -> InitialWeights:
    """The weights to start from, known by the digits in the parameter: their folder may be gone."""
    if written is None:
        return InitialWeights()
    folder, _, digits = written.rpartition("@")
    if saved.sha256 is not None and saved.sha256.startswith(digits):
        return saved.model_copy(update={"folder": folder})
    return InitialWeights(folder=folder, sha256=digits)


def _is_implied(name: str, told: set[str]) -> bool:
    """Whether a field was named before, or follows from others."""
    return name in told or name.startswith("derived.")


def _not_bit_for_bit(
    facts: CheckpointFacts, now: RunConfig, runtime: RuntimeConfig, launch: LaunchConfig
) -> list[str]:
    """What a resume would warn of; what depends on the machine only where parameters decide it."""
    parallel = now.parallel
    wanted: dict[str, object] = {
        "device": None if launch.device == "auto" else launch.device,
        "parallel.tensor": parallel.tensor,
        "parallel.pipeline": parallel.pipeline,
        "parallel.virtual_stages": parallel.virtual_stages,
        "parallel.data": parallel.data,
        "parallel.data_shard": parallel.data_shard,
        "parallel.sequence": parallel.sequence,
        "training.micro_batch_size": now.training.micro_batch_size,
        "launch.threads": launch.threads,
        "runtime.attention": None if runtime.attention == "auto" else runtime.attention,
        "runtime.kernels": runtime.kernels,
        "runtime.deterministic": runtime.deterministic,
        "torch": torch.__version__,
    }
    arithmetic = facts.scalar("arithmetic")
    saved: dict[str, object] = {}
    if isinstance(arithmetic, Mapping):
        saved = dict(leaves(arithmetic)) | {"runtime.attention": attention_of(arithmetic)}
    return [
        f"{name} was {saved[name]}, would be {value}"
        for name, value in wanted.items()
        if value is not None and saved.get(name) is not None and saved[name] != value
    ]


def _added_phases(saved: RunConfig, now: RunConfig) -> str:
    """Where a run with later phases leaves the way of the saved one; "" if it is another one."""
    for index, phase in enumerate(now.data.phases[1:], start=1):
        if fingerprint(now.before_phase(index)) == fingerprint(saved):
            return (
                "phases are added: it goes on from the newest checkpoint of this state at or "
                f"before sample {phase.from_samples}, if it has no state of its own"
            )
    return ""


def _length(facts: CheckpointFacts, now: RunConfig) -> str:
    end = now.training.train_iters
    if facts.iteration > end:
        return (
            f"the run ends at iteration {end}, before this checkpoint: an older one is used, or it "
            "starts at iteration 0"
        )
    if facts.iteration == end:
        return f"nothing would be left to train: the run ends at iteration {end}"
    return f"it would train from iteration {facts.iteration} to {end}"
