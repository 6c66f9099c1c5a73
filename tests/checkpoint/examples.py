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
        "tokenizer_fingerprint": "cd" * 32,
        "vocab_size": 19,
        "eod_id": 0,
        "corpora": {
            "stdlib": {
                "manifest": "data/tokens/stdlib/manifest.json",
                "tokens_sha256": "ab" * 32,
                "dtype": "uint16",
                "documents": 30,
                "tokens": 3000,
                "splits": {
                    "train": {"documents": [0, 27], "tokens": 2700, "samples": 168},
                    "valid": {"documents": [27, 28], "tokens": 150, "samples": 9},
                    "test": {"documents": [28, 30], "tokens": 150, "samples": 9},
                },
            },
        },
        "phases": [
            {
                "from_samples": 0,
                "seq_length": 16,
                "micro_batch_size": 2,
                "weights": {"stdlib": 168.0},
                "samples": {"stdlib": 168},
            },
        ],
        "validation": ["stdlib"],
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


_WEB = {
    "manifest": "data/tokens/web/manifest.json",
    "tokens_sha256": "ef" * 32,
    "dtype": "uint16",
    "documents": 10,
    "tokens": 1000,
    "splits": {
        "train": {"documents": [0, 9], "tokens": 900, "samples": 56},
        "valid": {"documents": [9, 10], "tokens": 100, "samples": 6},
        "test": {"documents": [10, 10], "tokens": 0, "samples": 0},
    },
}
_LONGER = {
    "from_samples": 40,
    "seq_length": 32,
    "micro_batch_size": 1,
    "weights": {"stdlib": 1.0, "web": 3.0},
    "samples": {"stdlib": 84, "web": 28},
}


def two_phases(**changes: object) -> RunConfig:
    """As ``run_config``, with a second corpus in the blend, and longer samples from 40 on."""
    tree = copy.deepcopy(_EXAMPLE)
    data = tree["data"]
    data["corpora"]["web"] = copy.deepcopy(_WEB)
    data["phases"][0]["weights"]["web"] = 56.0
    data["phases"][0]["samples"]["web"] = 56
    data["phases"].append(copy.deepcopy(_LONGER))
    data["validation"].append("web")
    return _changed(tree, changes)


def run_config(**changes: object) -> RunConfig:
    """The example with changed fields, written ``section__field=value``."""
    return _changed(copy.deepcopy(_EXAMPLE), changes)


def _changed(tree: dict, changes: dict[str, object]) -> RunConfig:
    for name, value in changes.items():
        *levels, leaf = name.split("__")
        below = tree
        for level in levels:
            below = below[int(level) if isinstance(below, list) else level]
        below[leaf] = value
    return RunConfig.model_validate(tree)
