"""The sections by themselves: limits of each field, documentation, frozenness."""

import ast
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from lib.config import data_facts, data_rules, data_section, operation, run_config, schema
from lib.config.operation import CONFIG_SECTIONS

REQUIRED: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2},
    "optimizer": {"lr": 1e-3},
    "training": {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1},
}


def build(section: str, **keys: Any) -> BaseModel:
    return CONFIG_SECTIONS[section].model_validate({**REQUIRED.get(section, {}), **keys})


@pytest.mark.parametrize(
    ("section", "key", "legal", "illegal"),
    [
        ("model", "num_layers", 1, 0),
        ("model", "num_query_groups", 1, 0),
        ("model", "attention_dropout", 0.0, 1.0),
        ("model", "hidden_dropout", 0.99, -0.1),
        ("model", "norm_epsilon", 1e-12, 0.0),
        ("model", "init_std", 1e-3, 0.0),
        ("model", "rope_theta", 1.0, 0.0),
        ("optimizer", "lr", 1e-9, 0.0),
        ("optimizer", "beta1", 0.0, 1.0),
        ("optimizer", "beta2", 0.999, 1.0),
        ("optimizer", "epsilon", 1e-12, 0.0),
        ("optimizer", "weight_decay", 0.0, -0.1),
        ("optimizer", "clip_grad", 0.0, -1.0),
        ("schedule", "min_lr", 0.0, -1e-5),
        ("data", "blend", {"web": 0.5, "code": 0}, {"web": -0.1}),
        ("data", "blend", {"web": 1}, {"web": float("inf")}),
        ("data", "validation", ("web",), "web"),
        ("data", "imported", {"web_2": "pairs/web"}, {"Web-2": "pairs/web"}),
        ("data", "positions", "document", "sample"),
        ("schedule", "warmup_iters", 0, -1),
        ("schedule", "decay_iters", 1, 0),
        ("schedule", "wsd_decay_samples", 1, 0),
        ("training", "seed", 0, -1),
        ("training", "seed", 2**63 - 1, 2**63),
        ("training", "train_iters", 1, 0),
        ("training", "global_batch_size", 1, 0),
        ("training", "micro_batch_size", 1, 0),
        ("training", "seq_length", 1, 0),
        ("training", "eval_interval", 0, -1),
        ("checkpoint", "save_interval", 0, -1),
        ("checkpoint", "keep_last", 1, 0),
        ("training", "rampup_start_batch_size", 1, 0),
        ("training", "rampup_increment", 1, 0),
        ("training", "rampup_samples", 1, 0),
        ("training", "label_smoothing", 0.0, 1.0),
        ("training", "label_smoothing", 0.99, -0.1),
        ("training", "z_loss", 1e-4, -1e-4),
        ("precision", "compute", "fp64", "fp8"),
        ("precision", "loss_scale", 1024.0, 0.0),
        ("precision", "initial_loss_scale", 2.0**32, 0.0),
        ("precision", "min_loss_scale", 1.0, float("inf")),
        ("precision", "loss_scale_window", 1, 0),
        ("precision", "loss_scale_hysteresis", 1, 0),
        ("parallel", "data", 1, 0),
        ("parallel", "tensor", 1, 0),
        ("parallel", "pipeline", 1, 0),
        ("parallel", "virtual_stages", 1, 0),
        ("parallel", "layers_per_chunk", (1, 2), (1, 0)),
        ("parallel", "sharding", "gradients", "nothing"),
        ("parallel", "data_shard", 1, 0),
        ("evaluate", "seed", 0, -1),
        ("evaluate", "temperature", 0.0, -0.1),
        ("evaluate", "top_k", 1, 0),
        ("evaluate", "prompts", ("a",), ("",)),
        ("evaluate", "num_samples", 0, -1),
        ("export", "format", "none", "onnx"),
        ("export", "dtype", "bf16", "fp64"),
        ("export", "max_shard_gigabytes", 0.5, 0.0),
        ("export", "max_shard_gigabytes", 5.0, float("inf")),
        ("launch", "processes", 1, 0),
        ("launch", "stop_timeout_s", 1, 0),
        ("launch", "nodes", 1, 0),
        ("launch", "node_rank", 0, -1),
        ("launch", "debug", "collectives", "everything"),
        ("runtime", "recompute", "full", "all"),
        ("runtime", "recompute_method", "block", "blocks"),
        ("runtime", "recompute_layers", 1, 0),
        ("runtime", "gradient_statistics", 0, -1),
        ("runtime", "log_interval", 1, 0),
        ("runtime", "prefetch", 0, -1),
    ],
)
def test_limits(section: str, key: str, legal: object, illegal: object) -> None:
    assert getattr(build(section, **{key: legal}), key) == legal
    with pytest.raises(ValidationError):
        build(section, **{key: illegal})


@pytest.mark.parametrize("split", ["90,5,5", "969,30,1", "100", "1,0,0", " 98.5, 1 , .5", "8,2"])
def test_splits_that_mean_something(split: str) -> None:
    assert build("training", split=split)


@pytest.mark.parametrize("split", ["", "a", "0,5,5", "1,-1,1", "1,2,3,4", "nan,1,1", "1,,1", "inf"])
def test_splits_that_mean_nothing(split: str) -> None:
    with pytest.raises(ValidationError, match="shares of training"):
        build("training", split=split)


@pytest.mark.parametrize("place", ["node0:29500", "10.0.0.1:1", "[fe80::1]:65535", "a.b.c:80"])
def test_rendezvous(place: str) -> None:
    assert build("launch", rendezvous=place)


@pytest.mark.parametrize("place", ["", "node0", ":29500", "node0:", "node0:x", "a:0", "a:65536"])
def test_rendezvous_without_host_or_port(place: str) -> None:
    with pytest.raises(ValidationError, match="must be host:port"):
        build("launch", rendezvous=place)


@pytest.mark.parametrize("name", list(CONFIG_SECTIONS))
def test_sections_are_frozen_and_closed(name: str) -> None:
    section = build(name)
    with pytest.raises(ValidationError):
        build(name, no_such_key=1)
    with pytest.raises(ValidationError):
        setattr(section, next(iter(type(section).model_fields)), 1)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"from_samples": 8, "seq_length": 8}, None),
        ({"from_samples": 8, "blend": {"web": 1}}, None),
        ({"from_samples": 0, "seq_length": 8}, "greater than or equal to 1"),
        ({"from_samples": 8}, "changes nothing; give blend, seq_length or micro_batch_size"),
        ({"blend": {"web": 1}}, "Field required"),
    ],
)
def test_a_phase_begins_somewhere_and_changes_something(
    keys: dict[str, Any], rule: str | None
) -> None:
    if rule is None:
        assert build("data", phases=[keys])
        return
    with pytest.raises(ValidationError, match=rule):
        build("data", phases=[keys])


DATACLASSES = ("Params", "PlannedPhase", "TokensOrigin")


@pytest.mark.parametrize(
    "module", [schema, operation, run_config, data_facts, data_rules, data_section]
)
def test_every_field_has_a_docstring(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    undocumented = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name in ("RunConfig", *DATACLASSES):
            continue  # documented in one place, or where their fields' types are defined
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and not has_text:
                undocumented.append(f"{node.name}.{ast.unparse(field.target)}")
    assert not undocumented
