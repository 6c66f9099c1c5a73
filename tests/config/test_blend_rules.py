"""Names, weights and phases of the section data: what is refused, and with which remedy."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config import blend_rules as rules
from lib.config.batch_schedule import BatchSchedule
from tests.config.sections import data, only, parallel, ramped, training

CORPORA = ("stdlib", "web")


def phase(from_samples: int, **keys: Any) -> dict[str, Any]:
    return {"from_samples": from_samples, **(keys or {"seq_length": 32})}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, None),
        ({"blend": {"web": 1}, "validation": ["stdlib"]}, None),
        ({"imported": {"pair": "p"}, "blend": {"pair": 1}}, None),
        ({"blend": {"wep": 1}}, "data.blend = wep: is no name of corpora or data.imported; "
                                "did you mean web? there are stdlib, web"),
        ({"validation": ["books", "books"]}, "data.validation = books: is no name"),
        ({"phases": [phase(4), phase(8, blend={"x1": 1})]}, "data.phases[1].blend = x1: is no"),
    ],
)  # fmt: skip
def test_names_are_known(keys: dict[str, Any], message: str | None) -> None:
    found = rules.names_are_known(data(**keys), CORPORA)
    if message is None:
        assert not list(found)
    else:
        assert only(found).startswith(message)


def test_an_imported_pair_has_a_name_of_its_own_and_is_read() -> None:
    taken = data(imported={"web": "pairs/web"})
    assert only(rules.imported_names_are_their_own(taken, CORPORA)) == (
        "data.imported.web = pairs/web: the section corpora has this name as well; give it "
        "another name"
    )
    pair: dict[str, Any] = {"imported": {"pair": "pairs/web"}}
    assert not list(rules.imported_names_are_their_own(data(**pair), CORPORA))
    assert "name it in data.blend" in only(
        rules.imported_tokens_are_read(data(**pair), training(), CORPORA)
    )
    for reader in (
        {"blend": {"pair": 1, "web": 1}},
        {"validation": ["pair"]},
        {"phases": [phase(4, blend={"pair": 1})]},
    ):
        read = data(**pair, **reader)
        assert not list(rules.imported_tokens_are_read(read, training(), CORPORA))


@pytest.mark.parametrize(
    ("names", "is_sound"), [(None, True), (["web"], True), ([], False), (["web", "web"], False)]
)
def test_a_loss_is_measured_once_and_of_something(names: list[str] | None, is_sound: bool) -> None:
    found = list(rules.validation_names_differ(data(validation=names)))
    assert (not found) == is_sound


def test_something_is_read_in_every_phase() -> None:
    rule = rules.blends_have_a_positive_weight
    assert not list(rule(data(blend={"web": 0, "stdlib": 1e-9})))
    assert only(rule(data(blend={"web": 0}))) == (
        "data.blend = {web: 0}: must have a weight above 0; write {NAME: 1}, or null"
    )
    assert "data.phases[0].blend = {}" in only(rule(data(phases=[phase(4, blend={})])))


def test_phases_begin_in_order_and_inside_the_training() -> None:
    """The training has 40 samples."""
    ordered = data(phases=[phase(4), phase(8), phase(36)])
    assert not list(rules.phases_begin_in_order(ordered))
    assert not list(rules.phases_begin_inside_the_training(ordered, training()))
    for second in (4, 8):
        found = only(rules.phases_begin_in_order(data(phases=[phase(8), phase(second)])))
        assert found.startswith(f"data.phases[1].from_samples = {second}: must be greater than")
    for first in (40, 44):
        found = only(
            rules.phases_begin_inside_the_training(data(phases=[phase(first)]), training())
        )
        assert "must be below the length of training, 40 samples" in found
    unknown = training(train_iters=None)
    assert not list(rules.phases_begin_inside_the_training(data(phases=[phase(44)]), unknown))


RAMPS = st.sampled_from([ramped(8, 2, 2, 24), ramped(8, 4, 4, 30), ramped(12, 3, 3, 50)])


@given(st.integers(1, 120), RAMPS | st.just(training()))
def test_a_phase_begins_exactly_where_a_step_does(start: int, section: Any) -> None:
    schedule, begins = BatchSchedule.of(section), [0]
    while begins[-1] < start:
        begins.append(begins[-1] + schedule.at(begins[-1]))
    found = list(rules.phases_begin_with_a_step(data(phases=[phase(start)]), section))
    assert (not found) == (start in begins)
    for problem in found:
        near = [int(n) for n in problem.remedy.removeprefix("nearest: ").split(" or ")]
        assert near == [n for n in begins[-2:] if n > 0]


@pytest.mark.parametrize(
    ("micro", "copies", "remedy"),
    [
        (None, 3, None),
        (1, None, None),
        (4, None, None),
        (3, None, "nearest: 2 or 4"),
        (2, 2, None),
        (4, 2, "nearest: 2"),
        (1, 3, "change parallel.data or the batch"),
    ],
)
def test_micro_batches_of_a_phase_divide_its_batches(
    micro: int | None, copies: int | None, remedy: str | None
) -> None:
    """The batch has 4 samples."""
    section = data(phases=[phase(4, seq_length=8, micro_batch_size=micro)])
    found = list(rules.phase_batches_divide(section, training(), parallel(data=copies)))
    assert [problem.remedy for problem in found] == ([] if remedy is None else [remedy])


def test_micro_batches_of_a_phase_divide_the_batches_of_a_rampup_that_goes_on() -> None:
    growing = ramped(8, 2, 2, 24)
    for start, count in ((4, 2), (24, 0)):
        section = data(phases=[phase(start, micro_batch_size=4)])
        found = list(rules.phase_batches_divide(section, growing, parallel()))
        assert len(found) == count, start


def test_sequences_of_a_phase_divide_by_tensor() -> None:
    rule, section = rules.phase_sequences_divide_by_tensor, data(phases=[phase(4, seq_length=18)])
    assert not list(rule(section, parallel(tensor=4)))
    assert not list(rule(section, parallel(tensor=2, sequence=True)))
    assert only(rule(section, parallel(tensor=4, sequence=True))) == (
        "data.phases[0].seq_length = 18: must be divisible by parallel.tensor = 4 with "
        "parallel.sequence: true; nearest: 16 or 20; or parallel.sequence: false"
    )
