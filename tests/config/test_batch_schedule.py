"""The batch ramp-up against a walk in exact fractions, written from Megatron's rule."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config.batch_schedule import BatchSchedule
from tests.config.sections import ramped, training


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    start, growth = draw(st.integers(1, 20)), draw(st.integers(1, 12))
    batch = start + growth * draw(st.integers(1, 9))
    return BatchSchedule(batch, start, growth, draw(st.integers(1, 500)))


def size_by_fractions(schedule: BatchSchedule, consumed: int) -> int:
    """Megatron: grow by the increment each samples / ((batch - start) / increment) samples."""
    if consumed >= schedule.samples:
        return schedule.global_batch_size
    increments = Fraction(schedule.global_batch_size - schedule.start, schedule.increment)
    grown = Fraction(consumed) / (Fraction(schedule.samples) / increments)
    return schedule.start + schedule.increment * (grown.numerator // grown.denominator)


def steps(schedule: BatchSchedule) -> Iterator[tuple[int, int]]:
    """Steps one by one: (samples before, size)."""
    consumed = 0
    while True:
        size = size_by_fractions(schedule, consumed)
        yield consumed, size
        consumed += size


def test_from_2_to_8_by_2_over_24_samples() -> None:
    """B52: eight samples for each of the sizes 2, 4 and 6, where they fit."""
    schedule = BatchSchedule.of(ramped(8, 2, 2, 24))
    assert schedule == BatchSchedule(8, start=2, increment=2, samples=24)
    consumed, seen = 0, []
    for _ in range(11):
        seen.append((consumed, schedule.at(consumed)))
        consumed += schedule.at(consumed)
    assert seen == [
        (0, 2), (2, 2), (4, 2), (6, 2), (8, 4), (12, 4), (16, 6), (22, 6), (28, 8), (36, 8),
        (44, 8),
    ]  # fmt: skip
    assert schedule.has_rampup


def test_without_a_rampup_all_steps_are_alike() -> None:
    schedule = BatchSchedule.of(training())
    assert schedule == BatchSchedule.constant(4)
    assert {schedule.at(n) for n in range(100)} == {4}
    assert not schedule.has_rampup
    assert [schedule.iterations(n) for n in (0, 1, 4, 5, 400)] == [0, 1, 1, 2, 100]
    assert [schedule.ends_near(n) for n in (1, 4, 5)] == [[4], [4], [4, 8]]


@given(schedules(), st.integers(0, 2000))
def test_the_size_is_that_of_the_rule(schedule: BatchSchedule, consumed: int) -> None:
    size = schedule.at(consumed)
    assert size == size_by_fractions(schedule, consumed)
    assert schedule.start <= size <= schedule.global_batch_size
    assert size <= schedule.at(consumed + 1)


@given(schedules(), st.integers(0, 2000))
def test_iterations_are_the_steps_that_begin_before(schedule: BatchSchedule, samples: int) -> None:
    begun = list(takewhile(lambda step: step[0] < samples, steps(schedule)))
    assert schedule.iterations(samples) == len(begun)


@given(schedules(), st.integers(1, 2000))
def test_ends_are_the_nearest_ones(schedule: BatchSchedule, samples: int) -> None:
    below = 0
    for end, _ in islice(steps(schedule), 1, None):
        if end > samples:
            break
        below = end
    expected = [samples] if below == samples else [n for n in (below, end) if n > 0]
    assert schedule.ends_near(samples) == expected


@pytest.mark.parametrize("samples", [10**12, 10**12 + 1])
def test_long_rampups_are_counted_without_walking(samples: int) -> None:
    schedule = BatchSchedule(4096, start=32, increment=32, samples=samples)
    end = schedule.ends_near(2 * samples)[0]
    count = schedule.iterations(end)
    assert schedule.iterations(end + 1) == count + 1
    assert schedule.ends_near(end) == [end]
