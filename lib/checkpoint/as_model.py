"""A checkpoint as a model: whole parameters and what they were trained by, for one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed import checkpoint as dcp

from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged
from lib.checkpoint.loading import verify
from lib.checkpoint.metadata import (
    SafeReader,
    TensorsOnlyPlanner,
    disagreements,
    read_metadata,
    require_agreement,
)
from lib.checkpoint.shapes import parameter_shapes
from lib.checkpoint.torch_files import alone_is_no_fault, reason_of
from lib.config.run_config import RunConfig
from lib.errors import UserError


@dataclass(frozen=True)
class CheckpointModel:
    """The model of a checkpoint.

    Attributes:
        config: what it was trained by.
        tensors: every parameter under its global name, fp32 on the CPU, without padding rows.
        scalars: what was saved beside the tensors (``lib.checkpoint.state``).
    """

    config: RunConfig
    tensors: dict[str, Tensor]
    scalars: dict[str, object]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint of ours, ``state/FINGERPRINT/iter_N``."""
    return (folder / folders.MANIFEST).is_file() and (folder / folders.SCALARS).is_file()


def read_checkpoint_model(folder: Path) -> CheckpointModel:
    """Reads the model of a checkpoint of which nothing else is known, verified first.

    Raises:
        UserError: it is damaged, or does not say what it is of.
    """
    try:
        verify(folder)
        scalars = folders.read_scalars(folder)
        config = RunConfig.model_validate(scalars["run_config"])
    except Damaged as fault:
        raise UserError(f"{folder}: is damaged: {fault}; take another checkpoint") from None
    except (KeyError, ValidationError):
        raise UserError(
            f"{folder}: does not say what model it is of (an older version wrote it); continue "
            "its run to the end and take model/"
        ) from None
    return CheckpointModel(config, whole_parameters(folder, config), scalars)


def whole_parameters(folder: Path, config: RunConfig) -> dict[str, Tensor]:
    """Every parameter of a checkpoint, fp32 on the CPU, without padding rows.

    So what is published is what was saved, in any layout, and no rank sends anything.

    Args:
        folder: a verified checkpoint.
        config: what it was trained by.

    Raises:
        UserError: it holds another model, or cannot be read.
    """
    stored = parameter_shapes(config.model, config.derived.padded_vocab_size)
    wanted = parameter_shapes(config.model, config.data.vocab_size)
    whole = read_parameters(folder, stored)
    return {name: value[: wanted[name][0]].float() for name, value in whole.items()}


def read_parameters(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Whole parameters of a checkpoint, as they are stored.

    Args:
        folder: a verified checkpoint.
        shapes: shape of each parameter by its global name, padding rows included.

    Returns:
        The parameters by global name, on the CPU, in the dtype of the master weights.

    Raises:
        UserError: as `whole_parameters`.
    """
    try:
        metadata = read_metadata(folder)
        entries = metadata.state_dict_metadata
        tensors = {
            f"model.{name}": torch.empty(shape, dtype=_dtype(entries.get(f"model.{name}")))
            for name, shape in shapes.items()
        }
        require_agreement(folder, disagreements(metadata, tensors, entries))
        with alone_is_no_fault():
            dcp.load(
                tensors,
                storage_reader=SafeReader(folder, metadata),
                planner=TensorsOnlyPlanner(),
                no_dist=True,
            )
    except Damaged as fault:
        raise UserError(f"{folder}: is damaged: {fault}; take another checkpoint") from None
    except dcp.CheckpointException as error:
        raise UserError(f"{folder}: cannot be read: {reason_of(error)}") from error
    return {name: tensors[f"model.{name}"] for name in shapes}


def _dtype(entry: object) -> torch.dtype:
    """That of a stored tensor; of one that is not there, whatever: it is named as missing."""
    properties = getattr(entry, "properties", None)
    return properties.dtype if properties is not None else torch.float32
