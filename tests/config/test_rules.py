"""Each rule: what it accepts, what it refuses, and which legal values it names."""

from collections.abc import Iterator
from inspect import isfunction
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config import batch_rules, blend_rules, layout_rules, rules
from lib.config.nearest import divisors_near, multiples_near
from lib.config.schema import OptimizerConfig
from lib.errors import Problem
from tests.config.sections import (
    data,
    evaluate,
    model,
    only,
    parallel,
    precision,
    schedule,
    training,
)


def test_hidden_size_divides_into_heads() -> None:
    rule = rules.hidden_size_divides_into_heads
    assert not list(rule(model()))
    assert not list(rule(model(num_attention_heads=3, head_dim=16)))
    assert only(rule(model(num_attention_heads=3))) == (
        "model.hidden_size = 32: must be divisible by model.num_attention_heads = 3, as head_dim "
        "is null; nearest hidden_size: 30 or 33; nearest num_attention_heads: 2 or 4; "
        "or give head_dim"
    )


def test_heads_divide_into_query_groups() -> None:
    rule = rules.heads_divide_into_query_groups
    for groups in (None, 1, 2, 4):
        assert not list(rule(model(num_query_groups=groups)))
    assert "nearest: 2 or 4" in only(rule(model(num_query_groups=3)))
    assert only(rule(model(num_query_groups=8))).endswith("nearest: 4")


def test_rope_needs_even_head_dim() -> None:
    rule = rules.rope_needs_even_head_dim
    assert not list(rule(model(head_dim=5)))
    assert not list(rule(model(position_embedding="rope")))
    assert "nearest: 4 or 6" in only(rule(model(position_embedding="rope", head_dim=5)))
    assert not list(rule(model(position_embedding="rope", hidden_size=21)))  # another rule's
    derived = model(position_embedding="rope", hidden_size=20)
    assert "5 (hidden_size / num_attention_heads)" in only(rule(derived))


def test_positions_cover_the_sequence() -> None:
    rule = rules.positions_cover_the_sequence
    for positions in (None, 16, 64):
        assert not list(rule(model(max_position_embeddings=positions), training(), data()))
    rope = model(max_position_embeddings=8, position_embedding="rope")
    assert not list(rule(rope, training(), data()))
    found = only(rule(model(max_position_embeddings=8), training(), data()))
    assert "write 16 or more, null, or a seq_length of at most 8" in found
    longer = data(phases=[{"from_samples": 8, "seq_length": 32}])
    assert not list(rule(model(max_position_embeddings=32), training(), longer))
    assert "longest seq_length = 32" in only(
        rule(model(max_position_embeddings=16), training(), longer)
    )


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp64"])
def test_loss_scale_is_for_fp16(compute: str) -> None:
    rule = rules.loss_scale_is_for_fp16
    assert not list(rule(precision(compute=compute)))
    assert not list(rule(precision(compute="fp16", loss_scale=1024)))
    assert only(rule(precision(compute=compute, loss_scale=1024))) == (
        f"precision.loss_scale = 1024: precision.compute: {compute} does not read it; write null, "
        "or compute: fp16"
    )


def test_loss_scale_begins_above_its_floor() -> None:
    rule = rules.loss_scale_begins_above_its_floor
    assert not list(rule(precision()))
    assert not list(rule(precision(initial_loss_scale=2, min_loss_scale=2)))
    found = only(rule(precision(initial_loss_scale=2, min_loss_scale=4)))
    assert "initial_loss_scale = 2: must be at least precision.min_loss_scale = 4" in found
    assert found.endswith("write 4 or more, or min_loss_scale: 2 or less")


def test_lengths_are_given_once() -> None:
    rule = rules.lengths_are_given_once
    assert not list(rule(training(), schedule(warmup_iters=1, decay_samples=40)))
    assert not list(rule(training(train_iters=None, train_samples=8), schedule()))
    assert "must be given" in only(rule(training(train_iters=None), schedule()))
    twice = schedule(
        warmup_iters=1, warmup_samples=1, decay_iters=1, decay_samples=1,
        wsd_decay_iters=1, wsd_decay_samples=1,
    )  # fmt: skip
    found = list(rule(training(train_samples=40), twice))
    assert [problem.field for problem in found] == [
        "training.train_samples",
        "schedule.warmup_samples",
        "schedule.decay_samples",
        "schedule.wsd_decay_samples",
    ]


@pytest.mark.parametrize(
    ("train", "warmup", "decay", "is_sound"),
    [
        (10, 0, 10, True),
        (10, 10, 10, False),
        (10, 20, 10, False),
        (1, 0, 1, True),
        (10, 9, 10, True),
        (10, 1, 5, True),
        (10, 2000, 5000, False),
        (10, 5, 5, False),
        (10, 5, 100, True),
        (10, None, None, True),
        (10, 10, None, False),
    ],
)
def test_warmup_ends_before_the_decay_and_the_training(
    train: int, warmup: int | None, decay: int | None, is_sound: bool
) -> None:
    course = schedule(warmup_iters=warmup, decay_iters=decay)
    rule = rules.warmup_ends_before_the_decay_and_the_training
    found = list(rule(course, training(train_iters=train)))
    assert (not found) == is_sound
    if found:
        limit = min(train, decay or train)
        assert found[0].remedy.startswith(f"write {limit - 1} or less")


def test_warmup_remedy_is_legal_in_its_own_unit() -> None:
    rule = rules.warmup_ends_before_the_decay_and_the_training
    found = list(rule(schedule(warmup_samples=50), training()))
    assert found[0].field == "schedule.warmup_samples"
    assert found[0].remedy.startswith("write 39 or less")
    assert not list(rule(schedule(warmup_samples=39), training()))
    found = list(rule(schedule(warmup_iters=4, decay_samples=15), training()))
    assert found[0].remedy.startswith("write 3 or less")
    assert not list(rule(schedule(warmup_iters=3, decay_samples=15), training()))


def test_constant_has_no_decay_to_end_before() -> None:
    rule = rules.warmup_ends_before_the_decay_and_the_training
    assert not list(rule(schedule(decay="constant", warmup_iters=5, decay_iters=3), training()))


def test_wsd_decay_is_given_for_wsd_only() -> None:
    rule = rules.wsd_decay_is_given_for_wsd_only
    assert not list(rule(schedule()))
    assert not list(rule(schedule(decay="wsd", wsd_decay_iters=3)))
    assert "needs the length of its last part" in only(rule(schedule(decay="wsd")))
    found = only(rule(schedule(decay="linear", wsd_decay_samples=3)))
    assert "schedule.wsd_decay_samples = 3: schedule.decay: linear does not read it" in found


@pytest.mark.parametrize(
    ("last", "warmup", "decay", "limit"),
    [(10, 0, None, None), (8, 2, 10, None), (9, 2, 10, 8), (11, 0, None, 10), (5, 0, 4, 4)],
)
def test_wsd_decay_fits_after_the_warmup(
    last: int, warmup: int, decay: int | None, limit: int | None
) -> None:
    course = schedule(decay="wsd", wsd_decay_iters=last, warmup_iters=warmup, decay_iters=decay)
    found = list(rules.wsd_decay_fits_after_the_warmup(course, training()))
    assert bool(found) == (limit is not None)
    for problem in found:
        assert problem.remedy == f"write {limit} or less, or make the decay longer"


def test_min_lr_is_at_most_lr() -> None:
    rule = rules.min_lr_is_at_most_lr
    optimizer = OptimizerConfig(lr=1e-3)
    assert not list(rule(schedule(min_lr=1e-3), optimizer))
    found = only(rule(schedule(min_lr=2e-3), optimizer))
    assert "must be at most optimizer.lr = 0.001; write 0.001 or less" in found


def test_evaluation_takes_batches() -> None:
    rule = rules.evaluation_takes_batches
    assert not list(rule(training(eval_interval=0, eval_iters=0)))
    assert not list(rule(training(eval_interval=5, eval_iters=1)))
    assert "eval_interval = 5" in only(rule(training(eval_interval=5, eval_iters=0)))


def test_top_k_is_at_most_the_vocabulary() -> None:
    rule = rules.top_k_is_at_most_the_vocabulary
    assert not list(rule(evaluate(top_k=300), 300))
    assert not list(rule(evaluate(top_k=None), 10))
    assert "write 300 or less, or null" in only(rule(evaluate(top_k=301), 300))


def test_all_rules_run_where_their_sections_are_there() -> None:
    sections: dict[str, object] = {
        "model": model(num_attention_heads=3),
        "parallel": parallel(tensor=2, sequence=True, data=3),
        "training": training(seq_length=15),
    }
    fields = {problem.field for problem in rules.broken_rules(sections)}
    assert fields == {
        "model.hidden_size",
        "model.num_attention_heads",
        "training.seq_length",
        "training.global_batch_size",
    }
    del sections["model"]
    fields = {problem.field for problem in rules.broken_rules(sections)}
    assert fields == {"training.seq_length", "training.global_batch_size"}


@pytest.mark.parametrize("module", [rules, batch_rules, blend_rules, layout_rules])
def test_every_rule_of_the_module_is_run(module: ModuleType) -> None:
    written = {
        name
        for name, value in vars(module).items()
        if isfunction(value)
        and value.__module__ == module.__name__
        and value.__annotations__["return"] == Iterator[Problem]
    }
    run = {rule.__name__ for rule in rules.ALL_RULES if rule.__module__ == module.__name__}
    assert len(run) > 5
    assert run == written


@given(st.integers(1, 10**4), st.integers(1, 500))
def test_nearest_multiples_are_nearest(value: int, step: int) -> None:
    named = [int(n) for n in multiples_near(value, step).split(" or ")]
    legal = range(step, value + 2 * step, step)
    assert all(n in legal for n in named)
    assert min(abs(n - value) for n in named) == min(abs(n - value) for n in legal)


@given(st.integers(1, 600), st.integers(1, 500))
def test_nearest_divisors_are_nearest(value: int, whole: int) -> None:
    named = [int(n) for n in divisors_near(value, whole).split(" or ")]
    legal = [n for n in range(1, whole + 1) if whole % n == 0]
    assert all(n in legal for n in named)
    assert len(set(named)) == len(named)
    assert min(abs(n - value) for n in named) == min(abs(n - value) for n in legal)


def test_huge_numbers_do_not_hang() -> None:
    assert divisors_near(3, 2**40) == "2 or 4"
