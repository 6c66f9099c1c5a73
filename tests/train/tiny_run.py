"""A tiny training run on the ranks of a test: random tokens, two layers, the real parts."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lib.config.launch_plan import layout_for
from lib.config.operation import CheckpointConfig, RuntimeConfig
from lib.config.run_config import DataFacts, Params, RunConfig, SplitRange, resolve
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from lib.data.splits import describe_splits
from lib.train.loop import Hooks, Progress, train
from lib.train.setup import build_training

VOCABULARY = 300


def write_tokens(folder: Path) -> Path:
    """A corpus of 40 documents of random tokens."""
    prefix = folder / "corpus_text_document"
    generator = np.random.default_rng(7)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            length = int(generator.integers(20, 120))
            writer.add_document(generator.integers(0, VOCABULARY, length).astype(np.uint16))
    return prefix


def tiny_config(prefix: Path, **changes: object) -> RunConfig:
    """A run of 6 steps; ``changes`` are "section.key" written with two underscores."""
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
    )
    dataset = IndexedDataset(prefix)
    found = describe_splits(dataset, params.training.split, params.training.seq_length)
    splits = {
        name: SplitRange(documents=facts.documents, tokens=facts.tokens, samples=facts.samples)
        for name, facts in found.items()
    }
    facts = DataFacts(
        prefix=str(prefix),
        tokens_sha256="0",
        tokenizer_fingerprint="0",
        vocab_size=VOCABULARY,
        eod_id=0,
        dtype="uint16",
        documents=dataset.num_documents,
        tokens=dataset.num_tokens,
        splits=splits,
    )
    return resolve(params, facts)


def run_tiny(config_text: str, spoil_at: int | None = None) -> dict[str, object]:
    """Trains on this rank and gives rows, validations, saves, and the final weights.

    Args:
        config_text: the run configuration as JSON.
        spoil_at: at this step a weight becomes not-a-number.
    """
    config = RunConfig.model_validate(json.loads(config_text))
    layout = layout_for(config, dist.get_world_size())
    parts = build_training(config, RuntimeConfig(), torch.device("cpu"), layout)
    rows, validations, saves = [], [], []

    def on_step(row):
        rows.append(row.as_row())
        if row.step == spoil_at:
            with torch.no_grad():
                parts.parameters["final_layernorm.weight"].to_local().fill_(float("nan"))

    hooks = Hooks(
        on_step=on_step,
        on_validation=lambda row: validations.append(dict(row)),
        save=lambda progress: saves.append(progress.iteration),
        stop_requested=lambda: False,
    )
    progress = Progress()
    train(parts, progress, hooks)
    parts.batches.close()
    weights = {name: value.detach().full_tensor() for name, value in parts.parameters.items()}
    return {
        "rows": rows,
        "validations": validations,
        "saves": saves,
        "weights": weights,
        "training_mode": parts.model.training,
        "skipped": progress.skipped,
    }
