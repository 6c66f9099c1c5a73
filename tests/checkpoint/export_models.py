"""Published models to export, and the ranks' part of it; without transformers, which takes long."""

from pathlib import Path

import torch.distributed as dist

from lib.checkpoint.export import export_model
from lib.checkpoint.published import publish_model
from lib.config.operation import ExportConfig, RuntimeConfig
from lib.config.run_config import RunConfig
from lib.data.tokenizer import save_tokenizer
from lib.parallel.mesh import build_mesh, groups_of
from lib.train.model_setup import build_sharded_model
from tests.checkpoint.examples import run_config
from tests.checkpoint.saved import save_tensors as save

FINGERPRINT, COMMIT = "ab" * 16, "c0ffee"


def configuration(model, tokenizer):
    """A run of a model of these fields with a tokenizer's vocabulary."""
    facts = {
        "data__vocab_size": tokenizer.vocab_size,
        "data__eod_id": tokenizer.eod_id,
        "data__tokenizer_fingerprint": tokenizer.fingerprint,
        "derived__padded_vocab_size": -(-tokenizer.vocab_size // 128) * 128,
    }
    return run_config(model=model.model_dump(), **facts)


def publish(folder, config, tensors, tokenizer):
    """Writes ``folder/model``; gives its path."""
    save_tokenizer(folder / "tokenizer", tokenizer)
    (folder / "train.log").write_text("")
    record = {"fingerprint": FINGERPRINT, "git": {"commit": COMMIT, "dirty": False}}
    log = folder / "train.log"
    publish_model(folder / "model", tensors, config, folder / "tokenizer", record, log)
    return folder / "model"


def export(source, output, figures=None, tokenizer=Path("nowhere"), **options):
    return export_model(
        source, output, ExportConfig.model_validate(options), figures or {}, tokenizer
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def save_initial(jobs):
    """On all ranks, for each layout: saves the initial model as its checkpoint of step 1."""
    for config_text, directory in jobs:
        config = RunConfig.model_validate_json(config_text)
        degrees = {"tensor": config.parallel.tensor, "pipeline": config.parallel.pipeline}
        ranks = degrees["tensor"] * degrees["pipeline"]
        mesh = build_mesh("cpu", **degrees, data=dist.get_world_size() // ranks)
        model = build_sharded_model(config, RuntimeConfig(), groups_of(mesh), mesh)
        tensors = {f"model.{name}": each for name, each in model.own_parameters().items()}
        scalars = {
            "run_config": config.model_dump(mode="json"),
            "tokens_seen": config.derived.train_tokens,
            "git_commit": COMMIT,
        }
        save(directory, 1, tensors, scalars, keep_last=1)
