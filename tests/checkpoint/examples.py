"""Run configurations for tests: one sound example and its variations."""

import copy

from lib.config.run_config import RunConfig

_EXAMPLE = {
    "model": {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "head_dim": 2,
        "ffn_hidden_size": 12,
        "max_position_embeddings": 16,
        "qkv_bias": True,
    },
    "precision": {"compute": "fp32"},
    "parallel": {"tensor": 1, "pipeline": 1, "data": None},
    "optimizer": {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
    },
    "schedule": {
        "decay": "cosine",
        "min_lr": 1e-4,
        "wsd_style": "linear",
        "warmup_samples": 8,
        "decay_samples": 80,
        "wsd_decay_samples": 0,
    },
    "training": {
        "seed": 1,
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "split": "90,5,5",
        "eval_interval": 0,
        "eval_iters": 1,
        "train_iters": 20,
        "train_samples": 80,
    },
    "checkpoint": {"save_interval": 5, "keep_last": 2, "keep_every": None},
    "data": {
        "prefix": "data/tokens/corpus_text_document",
        "tokens_sha256": "ab" * 32,
        "tokenizer_fingerprint": "cd" * 32,
        "vocab_size": 19,
        "eod_id": 0,
        "dtype": "uint16",
        "documents": 30,
        "tokens": 3000,
        "splits": {
            "train": {"documents": [0, 27], "tokens": 2700, "samples": 168},
            "valid": {"documents": [27, 28], "tokens": 150, "samples": 9},
            "test": {"documents": [28, 30], "tokens": 150, "samples": 9},
        },
    },
    "derived": {
        "padded_vocab_size": 128,
        "num_parameters": 1000,
        "tokens_per_step": 64,
        "train_tokens": 1280,
        "epochs": 0.5,
    },
    "initial": {},
}


def run_config(**changes: object) -> RunConfig:
    """The example with changed fields, written ``section__field=value``."""
    tree = copy.deepcopy(_EXAMPLE)
    for name, value in changes.items():
        *levels, leaf = name.split("__")
        below = tree
        for level in levels:
            below = below[level]
        below[leaf] = value
    return RunConfig.model_validate(tree)
