"""The loss scale against a model in exact numbers, against torch's, and when it gives up."""

import ast
import json
import math
from fractions import Fraction
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.optim import grad_scaler
from lib.optim.grad_scaler import (
    STUCK_STEPS,
    DynamicLossScale,
    LossScale,
    ScaleRules,
    StaticLossScale,
    build_loss_scale,
)

RULES = st.builds(
    lambda low, high, window, hysteresis: ScaleRules(2.0**high, 2.0**low, window, hysteresis),
    st.integers(-4, 0),
    st.integers(0, 6),
    st.integers(1, 5),
    st.integers(1, 4),
)
OUTCOMES = st.lists(st.booleans(), max_size=60)


def scales_by_history(rules, outcomes):
    """Each step's scale from the runs of equal outcomes alone, in exact fractions.

    Not a state machine like the code: growth happens at every ``window``-th step of a run of good
    ones; between two growths the overflows are numbered, and those from the ``hysteresis``-th on
    halve the scale.
    """
    scale, found, number = Fraction(rules.initial), [], 0
    for overflow, run in groupby(outcomes):
        for position, _ in enumerate(run, start=1):
            if overflow:
                number += 1
                if number >= rules.hysteresis:
                    scale = max(scale / 2, Fraction(rules.minimum))
            elif position % rules.window == 0:
                scale, number = scale * 2, 0
            found.append(scale)
    return found


@given(RULES, OUTCOMES)
def test_the_dynamic_scale_is_the_model(rules, outcomes):
    scale = DynamicLossScale(rules)
    found = []
    for overflow in outcomes:
        assert scale.update(overflow) == overflow
        found.append(Fraction(scale.scale))
    assert found == scales_by_history(rules, outcomes)
    assert all(value >= rules.minimum for value in found)


@given(st.integers(1, 5), OUTCOMES)
def test_without_hysteresis_it_is_torchs(window, outcomes):
    ours = DynamicLossScale(ScaleRules(2.0**10, 2.0**-100, window, hysteresis=1))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=window)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.ones(1))
    for overflow in outcomes:
        weight.grad = torch.tensor([math.inf if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.scale == theirs.get_scale()


def test_megatrons_defaults_by_hand():
    scale = DynamicLossScale(ScaleRules())
    seen = []
    for overflow, steps in (
        (True, 1),
        (False, 999),
        (True, 1),
        (True, 1),
        (False, 1000),
        (True, 1),
    ):
        for _ in range(steps):
            scale.update(overflow)
        seen.append(math.log2(scale.scale))
    # The first overflow is forgiven, and 999 good steps forgive no second one. Growth does.
    assert seen == [32, 32, 31, 30, 31, 31]


def test_one_overflow_halves_and_the_scale_grows_back():
    """B37: window 4, an overflow on step 3 only."""
    scale = DynamicLossScale(ScaleRules(8.0, 1.0, window=4, hysteresis=1))
    seen = []
    for step in range(1, 9):
        scale.update(step == 3)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 4, 8, 8]
    assert scale.stop_advice is None


@given(RULES, OUTCOMES, st.integers(0, 60))
def test_a_restored_scale_goes_on_as_the_old_one(rules, outcomes, cut):
    whole, first, second = (DynamicLossScale(rules) for _ in range(3))
    for overflow in outcomes[:cut]:
        first.update(overflow)
    second.restore(json.loads(json.dumps(first.state())))
    for overflow in outcomes[cut:]:
        second.update(overflow)
    for overflow in outcomes:
        whole.update(overflow)
    assert second.state() == whole.state()


@pytest.mark.parametrize("missing", ["scale", "good_steps", "overflows_left"])
def test_a_state_with_something_left_out_is_refused(missing):
    """B53."""
    scale = DynamicLossScale(ScaleRules())
    state = scale.state()
    del state[missing]
    with pytest.raises(KeyError, match=missing):
        scale.restore(state)


def test_a_state_of_another_kind_leaves_the_own_start():
    static, dynamic = StaticLossScale(64.0), DynamicLossScale(ScaleRules(initial=128.0))
    static.restore(dynamic.state())
    dynamic.restore(static.state())
    assert (static.scale, dynamic.scale) == (64.0, 128.0)
    dynamic.restore(LossScale().state())
    assert dynamic.scale == 128.0


def test_overflows_at_the_floor_stop_the_run_with_advice():
    """B37: stuck for ever at the floor."""
    scale = DynamicLossScale(ScaleRules(8.0, 1.0, window=4, hysteresis=2))
    for _ in range(4):  # one forgiven, then 4, 2, 1
        scale.update(overflow=True)
    assert (scale.scale, scale.stuck_steps) == (1.0, 0)
    for _ in range(STUCK_STEPS - 1):
        assert scale.update(overflow=True)
        assert scale.stop_advice is None
    scale.update(overflow=True)
    assert scale.scale == 1.0
    for word in ("10 steps", "min_loss_scale", "bf16", "optimizer.lr", "data"):
        assert word in scale.stop_advice


def test_a_good_step_at_the_floor_starts_the_count_anew():
    scale = DynamicLossScale(ScaleRules(1.0, 1.0, window=1000, hysteresis=1))
    for _ in range(5):
        for _ in range(STUCK_STEPS - 1):
            scale.update(overflow=True)
        scale.update(overflow=False)
    assert scale.stop_advice is None
    assert scale.stuck_steps == 0


def test_many_overflows_above_the_floor_are_no_reason_to_stop():
    scale = DynamicLossScale(ScaleRules())
    for _ in range(33):  # from 2^32 to 1, the first one forgiven
        scale.update(overflow=True)
    assert scale.scale == 1.0
    assert scale.stop_advice is None


def test_the_static_scale_stays_skips_and_stops():
    scale = StaticLossScale(1024.0)
    for overflow in [False, True] * 20:
        assert scale.update(overflow) == overflow
    assert scale.stop_advice is None
    for _ in range(STUCK_STEPS):
        scale.update(overflow=True)
    assert scale.scale == 1024.0
    assert "precision.loss_scale lower" in scale.stop_advice


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("fixed", [None, 128.0])
def test_other_number_types_have_no_scale_and_skip_nothing(compute, fixed):
    scale = build_loss_scale(compute, fixed, ScaleRules())
    assert not any(scale.update(overflow) for overflow in [True] * 50 + [False] * 2000)
    assert scale.scale == 1.0
    assert scale.stop_advice is None
    scale.restore(json.loads(json.dumps(scale.state())))


def test_fp16_is_dynamic_unless_a_number_is_given():
    assert build_loss_scale("fp16", None, ScaleRules(initial=16.0)).scale == 16.0
    assert isinstance(build_loss_scale("fp16", None, ScaleRules()), DynamicLossScale)
    fixed = build_loss_scale("fp16", 128.0, ScaleRules())
    assert isinstance(fixed, StaticLossScale)
    assert fixed.scale == 128.0


def test_it_is_plain_python():
    tree = ast.parse(Path(grad_scaler.__file__).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["dataclasses"]
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
