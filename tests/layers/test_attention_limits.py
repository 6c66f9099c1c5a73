"""What each attention backend says it cannot serve, and on which GPUs."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from lib.config.operation import RuntimeConfig
from lib.layers import flash_packages
from lib.layers.attention import BACKENDS
from lib.layers.attention_limits import AttentionCase

T4, V100, A100, RTX, H100, B200, RTX50 = (7, 5), (7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
CASE = AttentionCase(
    seq_length=2048,
    micro_batch_size=8,
    heads=16,
    kv_heads=4,
    head_dim=128,
    dtype="bf16",
    dropout=0.0,
    documents=False,
    deterministic=False,
)
EVERYWHERE = {"sdpa", "fused_softmax", "reference"}
HALF_KERNELS = {"cudnn", "flash", "efficient", "flash_attn"}

# changes of the case, GPU (None: a CPU), who can serve it
TABLE = [
    ({}, None, EVERYWHERE),
    ({"dtype": "fp64"}, None, EVERYWHERE),
    ({}, V100, EVERYWHERE),  # no bf16
    ({}, T4, EVERYWHERE),
    ({"dtype": "fp16"}, V100, EVERYWHERE | {"efficient"}),
    ({"dtype": "fp32"}, T4, EVERYWHERE | {"efficient"}),
    ({}, A100, EVERYWHERE | HALF_KERNELS),
    ({}, RTX, EVERYWHERE | HALF_KERNELS),
    ({}, H100, EVERYWHERE | HALF_KERNELS | {"flash_attn_4"}),
    ({"dtype": "fp16"}, H100, EVERYWHERE | HALF_KERNELS | {"flash_attn_4"}),
    ({"dtype": "fp32"}, H100, EVERYWHERE | {"efficient"}),
    ({"dtype": "fp64"}, H100, EVERYWHERE),
    ({"dropout": 0.125}, H100, EVERYWHERE | HALF_KERNELS),
    ({"dropout": 0.1}, H100, EVERYWHERE | HALF_KERNELS - {"cudnn"}),
    ({"documents": True}, H100, EVERYWHERE | HALF_KERNELS - {"cudnn"} | {"flash_attn_4"}),
    (
        {"documents": True, "dropout": 0.125},
        H100,
        EVERYWHERE | {"efficient", "flash_attn"},
    ),
    ({"deterministic": True}, H100, EVERYWHERE | HALF_KERNELS - {"cudnn"} | {"flash_attn_4"}),
    ({"deterministic": True}, RTX50, EVERYWHERE | HALF_KERNELS - {"cudnn"}),
    ({"head_dim": 12}, H100, EVERYWHERE),
    ({"head_dim": 12, "dtype": "fp32"}, H100, EVERYWHERE | {"efficient"}),
    ({"head_dim": 96}, H100, EVERYWHERE | HALF_KERNELS | {"flash_attn_4"}),
    ({"head_dim": 256}, B200, EVERYWHERE | HALF_KERNELS | {"flash_attn_4"}),
    ({"head_dim": 192}, B200, EVERYWHERE | HALF_KERNELS),
    ({"head_dim": 264}, H100, EVERYWHERE | {"efficient"}),
    ({"seq_length": 1}, H100, EVERYWHERE | HALF_KERNELS - {"cudnn"} | {"flash_attn_4"}),
]


@pytest.mark.parametrize(("changes", "capability", "serving"), TABLE)
def test_who_serves_what(changes, capability, serving, monkeypatch):
    """As if all packages were installed."""
    monkeypatch.setattr(flash_packages, "_imported", lambda name: torch)
    case = replace(CASE, **changes)
    found = {name for name, each in BACKENDS.items() if each.why_not(case, capability) is None}
    assert found == serving


REASONS = [
    ("flash", {}, None, "needs a GPU"),
    ("flash", {}, V100, "needs a GPU of compute capability 8.0 or later, this one has 7.0"),
    ("efficient", {}, T4, "needs a GPU of compute capability 8.0 or later, this one has 7.5"),
    ("efficient", {"dtype": "fp64"}, H100, "does not compute in fp64"),
    ("cudnn", {"dtype": "fp32"}, H100, "bf16 and fp16 only, not in fp32"),
    ("cudnn", {"documents": True}, H100, "does not attend within documents"),
    ("cudnn", {"deterministic": True}, H100, "is not deterministic"),
    ("cudnn", {"dropout": 0.1}, H100, "takes dropout in multiples of 1/16, not 0.1"),
    ("cudnn", {"seq_length": 1000}, H100, "9.15.1 for lengths that are no multiple of 128"),
    ("cudnn", {"seq_length": 1}, H100, "takes no sequences of one token"),
    ("flash", {"documents": True, "dropout": 0.1}, H100, "has no dropout within documents"),
    ("flash", {"head_dim": 12}, H100, "a head dimension that is a multiple of 8, not 12"),
    ("flash", {"head_dim": 320}, H100, "a head dimension of 256 or less, not 320"),
    ("flash_attn_4", {"dropout": 0.1}, H100, "has no dropout"),
    ("flash_attn_4", {}, A100, "needs a GPU of compute capability 9.0 or later"),
]


@pytest.mark.parametrize(("name", "changes", "capability", "reason"), REASONS)
def test_the_reason_is_said(name, changes, capability, reason, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert reason in BACKENDS[name].why_not(replace(CASE, **changes), capability)


def test_a_newer_cudnn_takes_any_length(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    assert BACKENDS["cudnn"].why_not(replace(CASE, seq_length=1000), H100) is None


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_4"])
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    message = "needs flash_attn, which cannot be imported (No module named 'flash_attn')"
    monkeypatch.setattr(flash_packages, "_imported", lambda module: message)
    assert BACKENDS[name].why_not(CASE, H100) == message


def test_the_configuration_knows_all_names():
    (names,) = (get_args(RuntimeConfig.model_fields["attention"].annotation),)
    assert set(names) == {"auto", *BACKENDS}
