"""The learning rate against tables by hand, and its properties for any schedule."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lib.optim.lr_schedule import LearningRate, decay_form

DECAYS = ("cosine", "linear", "constant", "wsd")
STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
BATCH = 4


def rates(decay, *, iters, warmup, length, tail=0, style="linear", batch=BATCH):
    """The rate of every step; lengths in iterations, peak 1, minimum 0.1."""
    schedule = LearningRate(
        max_lr=1.0,
        min_lr=0.1,
        decay=decay,
        warmup_samples=warmup * batch,
        decay_samples=length * batch,
        wsd_decay_samples=tail * batch,
        wsd_style=style,
    )
    return [schedule.at(step * batch, batch) for step in range(iters)]


# B24: (iterations, warm-up, decay) and the rate of each step of a linear decay from 1 to 0.1.
HAND_TABLES = [
    ((10, 0, 10), [1.0, 0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19]),
    ((10, 10, 10), [step / 11 for step in range(1, 11)]),
    ((10, 20, 10), [step / 21 for step in range(1, 11)]),
    ((1, 0, 1), [1.0]),
    ((10, 9, 10), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
    ((10, 1, 5), [0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1, 0.1]),
]


@pytest.mark.parametrize(("case", "expected"), HAND_TABLES)
def test_linear_decay_by_hand(case, expected):
    iters, warmup, length = case
    found = rates("linear", iters=iters, warmup=warmup, length=length)
    assert found == pytest.approx(expected, rel=1e-12)


def test_cosine_by_hand():
    found = rates("cosine", iters=8, warmup=2, length=6)
    # cos(0), cos(45), cos(90) and cos(135 degrees), then the minimum.
    factors = [1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]
    expected = [1 / 3, 2 / 3, *(0.1 + 0.9 * factor for factor in factors), 0.1, 0.1]
    assert found == pytest.approx(expected, rel=1e-12)


def test_constant_by_hand():
    assert rates("constant", iters=6, warmup=3, length=4) == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1, 1], rel=1e-12
    )


@pytest.mark.parametrize(
    ("style", "factors"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
        ("exponential", [1.0, 0.681792830507429, 0.414213562373095, 0.189207115002721]),
        ("minus_sqrt", [1.0, 0.5, 0.292893218813452, 0.133974596215561]),
    ],
)
def test_wsd_by_hand(style, factors):
    found = rates("wsd", iters=12, warmup=2, length=10, tail=4, style=style)
    stable = [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]
    tail = [0.1 + 0.9 * factor for factor in factors]
    assert found == pytest.approx([*stable, *tail, 0.1, 0.1], rel=1e-12)


schedules = st.builds(
    LearningRate,
    max_lr=st.floats(1e-6, 1.0),
    min_lr=st.just(0.0),
    decay=st.sampled_from(DECAYS),
    warmup_samples=st.integers(0, 500),
    decay_samples=st.integers(1, 2000),
    wsd_decay_samples=st.integers(1, 500),
    wsd_style=st.sampled_from(STYLES),
)


@st.composite
def legal_schedules(draw):
    """What the rules of the configuration let through."""
    schedule = draw(schedules)
    assume(schedule.warmup_samples < schedule.decay_samples)
    tail = 0
    if schedule.decay == "wsd":
        tail = schedule.wsd_decay_samples
        assume(tail <= schedule.decay_samples - schedule.warmup_samples)
    share = draw(st.floats(0, 1))
    return LearningRate(
        **vars(schedule) | {"min_lr": share * schedule.max_lr, "wsd_decay_samples": tail}
    )


@given(schedule=schedules, batch=st.integers(1, 64), consumed=st.integers(0, 10**7))
def test_always_finite_never_negative_and_never_above_the_peak(schedule, batch, consumed):
    """Also where the warm-up is longer than the decay, or the tail than both (B24)."""
    for samples in (consumed, 0, *range(0, 2600, 97)):
        rate = schedule.at(samples, batch)
        assert math.isfinite(rate)
        assert 0 <= rate <= schedule.max_lr * (1 + 1e-12)
    assert schedule.at(0, batch) > 0


@given(schedule=legal_schedules(), batch=st.integers(1, 64))
def test_rises_to_the_peak_then_falls_to_the_minimum(schedule, batch):
    steps = range(0, schedule.decay_samples + 3 * batch, batch)
    course = [schedule.at(samples, batch) for samples in steps]
    peak = max(course)
    # Between two steps the peak may be passed by, and a decay shorter than a step skipped.
    has_step_at_the_peak = schedule.warmup_samples % batch == 0
    if has_step_at_the_peak and schedule.warmup_samples + batch < schedule.decay_samples:
        assert peak == pytest.approx(schedule.max_lr, rel=1e-12)
    top = course.index(peak)
    if schedule.decay in ("linear", "cosine") and schedule.min_lr < 0.999 * peak:
        assert course.count(schedule.max_lr) <= 1
    slack = 1e-12 * schedule.max_lr
    for before, after in itertools.pairwise(course[: top + 1]):
        assert after > before
    for before, after in itertools.pairwise(course[top:]):
        assert after <= before + slack
    end = schedule.max_lr if schedule.decay == "constant" else schedule.min_lr
    for samples in (schedule.decay_samples, schedule.decay_samples + 1, 10**9):
        assert schedule.at(samples, batch) == end


@given(schedule=legal_schedules())
def test_continuous_at_the_joints(schedule):
    """Sample by sample, over a schedule a hundred thousand times as long."""
    scale = 10**5
    long = LearningRate(
        **vars(schedule)
        | {
            name: getattr(schedule, name) * scale
            for name in ("warmup_samples", "decay_samples", "wsd_decay_samples")
        }
    )
    joints = {long.warmup_samples, long.decay_samples}
    joints.add(long.decay_samples - long.wsd_decay_samples)
    for joint in joints:
        if joint == 0 or (joint == long.decay_samples and long.decay == "constant"):
            continue
        jump = abs(long.at(joint, 1) - long.at(joint - 1, 1))
        # A phase is 10^5 samples at least; minus_sqrt starts as steep as a root: 1 / sqrt(10^5).
        assert jump <= 4e-3 * long.max_lr


@given(
    schedule=legal_schedules(),
    batch=st.integers(1, 32),
    kills=st.lists(st.integers(0, 40), max_size=3),
)
def test_a_pure_function_of_consumed_samples(schedule, batch, kills):
    """B52: the column of rates is the same however often the run was stopped."""
    whole = [schedule.at(step * batch, batch) for step in range(41)]
    bounds = sorted({0, *kills, 41})
    pieces = []
    for first, last in itertools.pairwise(bounds):
        again = LearningRate(**vars(schedule))
        pieces += [again.at(step * batch, batch) for step in range(first, last)]
    assert pieces == whole


@given(schedule=legal_schedules(), start=st.integers(0, 2000), sizes=st.lists(st.integers(1, 64)))
def test_after_the_warm_up_the_batch_size_does_not_matter(schedule, start, sizes):
    samples = schedule.warmup_samples + start
    for size in sizes:
        assert schedule.at(samples, size) == schedule.at(samples, 1)


@pytest.mark.parametrize("style", [*STYLES])
def test_decay_forms_fall_from_1_to_0(style):
    values = [decay_form(style, step / 1000) for step in range(1000)]
    assert values[0] == 1.0
    assert all(after < before for before, after in itertools.pairwise(values))
    assert 0 < values[-1] < 2e-3
