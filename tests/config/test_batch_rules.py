"""Each rule on batches: what it accepts, what it refuses, and which legal values it names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config import batch_rules as rules
from tests.config.sections import only, parallel, ramped, schedule, training


@pytest.mark.parametrize(
    ("batch", "micro", "data", "remedy"),
    [
        (6, 4, None, "nearest global_batch_size: 4 or 8; nearest micro_batch_size: 3 or 6"),
        (8, 2, 3, "nearest global_batch_size: 6 or 12"),
        (2, 1, 4, "nearest global_batch_size: 4"),
        (2, 4, None, "nearest global_batch_size: 4; nearest micro_batch_size: 2"),
        (12, 4, 2, "nearest global_batch_size: 8 or 16; nearest micro_batch_size: 3 or 6"),
    ],
)
def test_global_batch_is_refused_not_rounded(
    batch: int, micro: int, data: int | None, remedy: str
) -> None:
    sizes = training(global_batch_size=batch, micro_batch_size=micro)
    found = list(rules.global_batch_divides(sizes, parallel(data=data)))
    assert [problem.remedy for problem in found] == [remedy]
    assert str(micro) in found[0].rule


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_global_batch_divides_exactly_where_it_does(batch: int, micro: int, data: int) -> None:
    sizes = training(global_batch_size=batch, micro_batch_size=micro)
    for layout in (parallel(data=data), parallel(data_shard=data)):
        found = list(rules.global_batch_divides(sizes, layout))
        assert bool(found) == (batch % (micro * data) != 0)


def test_copies_come_in_groups_of_data_shard() -> None:
    found = only(rules.global_batch_divides(training(), parallel(data_shard=3)))
    assert "training.micro_batch_size = 2 x parallel.data_shard = 3; nearest" in found
    assert "nearest global_batch_size: 6" in found


def test_train_samples_are_whole_steps() -> None:
    rule = rules.train_samples_are_whole_steps
    assert not list(rule(training()))
    assert not list(rule(training(train_iters=None, train_samples=8)))
    assert not list(rule(ramped(8, 2, 2, 24, train_samples=10)))  # another rule's
    found = only(rule(training(train_iters=None, train_samples=10)))
    assert "divisible by training.global_batch_size = 4; nearest: 8 or 12" in found


def test_train_samples_are_whole_steps_of_the_rampup() -> None:
    """Steps of 2, 2, 2, 2, 4, 4, 6, 6 and then 8."""
    rule = rules.train_samples_are_whole_steps_of_the_rampup
    for samples in (2, 8, 12, 22, 28, 36, 44):
        assert not list(rule(ramped(8, 2, 2, 24, train_samples=samples)))
    assert only(rule(ramped(8, 2, 2, 24, train_samples=40))) == (
        "training.train_samples = 40: must be where a step ends, with the ramp-up's smaller "
        "batches counted; nearest: 36 or 44"
    )
    assert only(rule(ramped(8, 2, 2, 24, train_samples=1))).endswith("nearest: 2")
    assert not list(rule(training(train_iters=None, train_samples=10)))
    assert not list(rule(ramped(8, 2, 5, 24, train_samples=10)))


@pytest.mark.parametrize(
    "missing", ["rampup_start_batch_size", "rampup_increment", "rampup_samples"]
)
def test_rampup_is_given_whole(missing: str) -> None:
    rule = rules.rampup_is_given_whole
    assert not list(rule(training()))
    assert not list(rule(ramped(8, 2, 2, 24)))
    found = only(rule(ramped(8, 2, 2, 24, **{missing: None})))
    assert found.startswith(f"training.{missing} = null: must be given, as training.rampup_")
    assert "null for all three" in found


def test_two_missing_keys_are_two_problems() -> None:
    found = list(rules.rampup_is_given_whole(training(rampup_samples=24)))
    assert [problem.field for problem in found] == [
        "training.rampup_start_batch_size",
        "training.rampup_increment",
    ]


def test_rampup_starts_below_the_full_batch() -> None:
    rule = rules.rampup_starts_below_the_full_batch
    assert not list(rule(training()))
    assert not list(rule(ramped(8, 7, 1, 24)))
    for start in (8, 9):
        found = only(rule(ramped(8, start, 1, 24)))
        assert f"rampup_start_batch_size = {start}: must be below" in found
        assert "global_batch_size = 8; write 7 or less, or null" in found
    assert "; write null for all" in only(rule(ramped(1, 1, 1, 24)))


def test_rampup_ends_at_the_full_batch() -> None:
    """B52: 2 to 8 goes by 2, not by 4."""
    rule = rules.rampup_ends_at_the_full_batch
    for growth in (1, 2, 3, 6):
        assert not list(rule(ramped(8, 2, growth, 24)))
    found = only(rule(ramped(8, 2, 4, 24)))
    assert "rampup_increment = 4: must divide training.global_batch_size - " in found
    assert found.endswith("= 6; nearest: 3 or 6")


@pytest.mark.parametrize(
    ("start", "growth", "fields"),
    [
        (2, 2, []),
        (3, 1, ["training.rampup_start_batch_size", "training.rampup_increment"]),
        (2, 3, ["training.rampup_increment"]),
        (5, 2, ["training.rampup_start_batch_size"]),
    ],
)
def test_rampup_batches_divide(start: int, growth: int, fields: list[str]) -> None:
    """B52: over two copies the increment 3 is refused."""
    rule = rules.rampup_batches_divide
    found = list(rule(ramped(8, start, growth, 24), parallel(data=2)))
    assert [problem.field for problem in found] == fields
    for problem in found:
        assert problem.rule.endswith("training.micro_batch_size = 1 x parallel.data = 2")
        assert problem.remedy == {"3": "nearest: 2 or 4", "1": "nearest: 2"}.get(
            problem.value, "nearest: 4 or 6"
        )
    assert not list(rule(ramped(8, start, growth, 24), parallel()))


LENGTHS: dict[str, dict[str, Any]] = {
    "training.train_iters": {},
    "schedule.warmup_iters": {"warmup_iters": 1},
    "schedule.decay_iters": {"decay_iters": 9},
    "schedule.wsd_decay_iters": {"wsd_decay_iters": 3},
}


@pytest.mark.parametrize("field", list(LENGTHS))
def test_rampup_wants_lengths_in_samples(field: str) -> None:
    rule = rules.rampup_wants_lengths_in_samples
    in_samples = schedule(warmup_samples=8, decay_samples=80, wsd_decay_samples=8)
    assert not list(rule(ramped(8, 2, 2, 24), in_samples))
    assert not list(rule(training(), schedule(**LENGTHS[field])))
    length = {"train_iters": 10, "train_samples": None} if field == "training.train_iters" else {}
    found = only(rule(ramped(8, 2, 2, 24, **length), schedule(**LENGTHS[field])))
    assert found.startswith(f"{field} = ")
    assert "must be null while training.rampup_samples = 24" in found
    assert found.endswith(f"give {field.replace('iters', 'samples')} instead")
