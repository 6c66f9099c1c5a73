"""The finished model as a folder of plain files, readable without a process group or this code.

    model/
        model.safetensors      all parameters, fp32, under their global names, without padding rows
        run_config.json        what it was trained by
        tokenizer.json, tokenizer_info.json
        run_record.json        command, environment, versions, git commit, data, parameters
        train.log              the whole log

The folder appears whole or not at all.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lib.atomic import atomic_directory
from lib.checkpoint.shapes import parameter_shapes
from lib.config.run_config import RunConfig
from lib.errors import UserError

WEIGHTS = "model.safetensors"
RUN_CONFIG = "run_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_info.json")
RUN_RECORD = "run_record.json"
LOG = "train.log"


def publish_model(
    directory: Path,
    tensors: Mapping[str, Tensor],
    run_config: RunConfig,
    tokenizer_directory: Path,
    record: Mapping[str, object],
    log: Path,
) -> None:
    """Writes the finished model; called by one rank.

    Args:
        directory: where it goes; what is there is replaced.
        tensors: whole parameters on the CPU in fp32, vocabulary padding rows cut.
        run_config: what it was trained by.
        tokenizer_directory: holds the tokenizer's two files.
        record: the record of the run, as JSON.
        log: the log of the run.

    Raises:
        UserError: the disk is full or a file is missing; nothing of the new folder is left.
    """
    problems = _disagreements(tensors, run_config)
    assert not problems, problems
    assert all(tensor.device.type == "cpu" for tensor in tensors.values())
    try:
        with atomic_directory(directory) as partial:
            # One metadata entry: with several their order, and so the file's bytes, would vary.
            contents = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(contents, partial / WEIGHTS, metadata={"format": "pt"})
            (partial / RUN_CONFIG).write_text(run_config.to_json(), encoding="utf-8")
            for name in TOKENIZER_FILES:
                shutil.copyfile(tokenizer_directory / name, partial / name)
            text = json.dumps(record, indent=2, sort_keys=True) + "\n"
            (partial / RUN_RECORD).write_text(text, encoding="utf-8")
            shutil.copyfile(log, partial / LOG)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the model could not be written to {directory}: {error}; its checkpoints are kept, "
            "so mend the cause and run again"
        ) from error


def read_model(directory: Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """Reads a published model.

    Returns:
        Its run configuration and its parameters, fp32 on the CPU, without padding rows.

    Raises:
        UserError: a file is missing or damaged, or weights and configuration disagree.
    """
    for name in (RUN_CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing: {directory} holds no finished model")
    run_config = RunConfig.load(directory / RUN_CONFIG)
    try:
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{directory / WEIGHTS} cannot be read ({error}); publish the model again"
        ) from error
    if problems := _disagreements(tensors, run_config):
        shown = "; ".join(problems[:5])
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise UserError(
            f"{directory / WEIGHTS} does not fit {directory / RUN_CONFIG}: {shown}{more}"
        )
    return run_config, tensors


def _disagreements(tensors: Mapping[str, Tensor], run_config: RunConfig) -> list[str]:
    """Where names, shapes or types are not what the configuration says."""
    expected = parameter_shapes(run_config.model, run_config.data.vocab_size)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in expected]
    for name, shape in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
        elif tensor.dtype != torch.float32:
            problems.append(f"{name} is {tensor.dtype} instead of torch.float32")
    return problems
