"""The attention that a checkpoint names: a resume takes it again, so ``auto`` changes no digit."""

from pathlib import Path

import pytest

from lib.checkpoint import compare
from lib.checkpoint.inspect import CheckpointFacts
from lib.checkpoint.state import attention_of
from lib.config.operation import LaunchConfig, RuntimeConfig
from tests.checkpoint.examples import run_config


@pytest.mark.parametrize(
    ("saved", "wanted", "reasons"),
    [
        ("cudnn", "auto", []),
        ("cudnn", "cudnn", []),
        ("cudnn", "flash", ["runtime.attention was cudnn, would be flash"]),
        ("auto", "auto", []),  # saved when auto always was sdpa
        ("auto", "sdpa", []),
        ("auto", "flash", ["runtime.attention was sdpa, would be flash"]),
        (None, "flash", []),
    ],
)
def test_what_a_preview_says_of_it(saved, wanted, reasons):
    arithmetic = {} if saved is None else {"runtime.attention": saved}
    scalars = {"arithmetic": arithmetic}
    facts = CheckpointFacts(Path(), 5, scalars, (), {}, is_hashed=False, damage=())
    runtime = RuntimeConfig(attention=wanted)
    assert compare._not_bit_for_bit(facts, run_config(), runtime, LaunchConfig()) == reasons


def test_its_name():
    assert attention_of({"runtime.attention": "flash_attn_4"}) == "flash_attn_4"
    assert attention_of({"runtime.attention": "auto"}) == "sdpa"
    assert attention_of({}) is None
