"""A tiny training run on the ranks of a test: random tokens, two layers, the real parts."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from lib.config.data_section import DataSection
from lib.config.launch_plan import layout_for
from lib.config.operation import CheckpointConfig, RuntimeConfig
from lib.config.run_config import Params, RunConfig, resolve
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.parallel.storage import local
from lib.train.loop import Hooks, train
from lib.train.random_tokens import describe_tokens, random_corpus
from lib.train.setup import build_training
from lib.train.step import Progress

VOCABULARY = 300


def write_tokens(folder: Path, seed: int = 7) -> Path:
    """A corpus of 40 documents of random tokens; gives the path of its manifest."""
    return random_corpus(folder, VOCABULARY, documents=40, seed=seed)


def tiny_config(manifests: Path | Mapping[str, Path], **changes: object) -> RunConfig:
    """A run of 6 steps.

    Args:
        manifests: of one corpus, or of several by name.
        **changes: keys of sections, "section.key" written with two underscores.
    """
    if isinstance(manifests, Path):
        manifests = {"tiny": manifests}
    sections: dict[str, dict[str, object]] = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        "precision": {},
        "parallel": {},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_iters": 2, "decay_iters": 6},
        "training": {
            "seq_length": 16,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 6,
            "split": "80,10,10",
            "eval_interval": 0,
            "eval_iters": 2,
        },
        "checkpoint": {},
        "data": {},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        sections[section][key] = value
    params = Params(
        ModelSection(**sections["model"]),
        PrecisionConfig(**sections["precision"]),
        ParallelConfig(**sections["parallel"]),
        OptimizerConfig(**sections["optimizer"]),
        ScheduleSection(**sections["schedule"]),
        TrainingSection(**sections["training"]),
        CheckpointConfig(**sections["checkpoint"]),
        DataSection(**sections["data"]),
        tuple(manifests),
    )
    return resolve(params, describe_tokens(manifests, params))


def build_tiny(config_text: str, **runtime: object):
    """The training parts of this rank, for a configuration as JSON and changes of ``runtime``."""
    config = RunConfig.model_validate_json(config_text)
    layout = layout_for(config, dist.get_world_size())
    return build_training(config, RuntimeConfig(**runtime), torch.device("cpu"), layout)


def stored_whole(parts) -> dict[str, torch.Tensor]:
    """This rank's parameters whole, copies."""
    held = parts.model.parameters.items()
    return {name: value.detach().full_tensor().clone() for name, value in held}


def run_tiny(config_text: str, spoil_at: int | None = None, **runtime: object) -> dict[str, object]:
    """Trains on this rank and gives rows, validations, saves, and the final weights.

    Args:
        config_text: the run configuration as JSON.
        spoil_at: at this step a weight becomes not-a-number.
        runtime: changes of the ``runtime`` section.
    """
    parts = build_tiny(config_text, **runtime)
    rows, validations, saves, gradients = [], [], [], []

    def on_step(row):
        rows.append(row.as_row())
        if row.step == spoil_at:
            with torch.no_grad():
                local(parts.model.parameters["final_layernorm.weight"]).fill_(float("nan"))

    hooks = Hooks(
        on_step=on_step,
        on_validation=lambda row: validations.append(dict(row)),
        on_gradients=gradients.append,
        save=lambda progress: saves.append(progress.iteration),
        stop_requested=lambda: False,
    )
    progress = Progress()
    train(parts, progress, hooks)
    parts.close()
    return {
        "rows": rows,
        "validations": validations,
        "saves": saves,
        "gradients": gradients,
        "weights": stored_whole(parts),
        "training_mode": parts.model.chunks.training,
        "skipped": progress.skipped,
    }
