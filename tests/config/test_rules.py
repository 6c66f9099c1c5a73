"""Each rule: what it accepts, what it refuses, and which legal values it names."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config import rules
from lib.config.nearest import divisors_near, multiples_near
from lib.config.operation import EvaluateConfig
from lib.config.schema import (
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    ScheduleSection,
    TrainingSection,
)
from lib.errors import Problem

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
TRAINING = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 10}


def model(**keys: Any) -> ModelSection:
    return ModelSection.model_validate({**MODEL, **keys})


def training(**keys: Any) -> TrainingSection:
    return TrainingSection.model_validate({**TRAINING, **keys})


def schedule(**keys: Any) -> ScheduleSection:
    return ScheduleSection.model_validate(keys)


def parallel(**keys: Any) -> ParallelConfig:
    return ParallelConfig.model_validate(keys)


def evaluate(**keys: Any) -> EvaluateConfig:
    return EvaluateConfig.model_validate(keys)


def only(found: Iterator[Problem]) -> str:
    problems = list(found)
    assert len(problems) == 1, problems
    return str(problems[0])


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
        assert not list(rule(model(max_position_embeddings=positions), training()))
    assert not list(rule(model(max_position_embeddings=8, position_embedding="rope"), training()))
    found = only(rule(model(max_position_embeddings=8), training()))
    assert "write 16 or more, null, or a seq_length of at most 8" in found


def test_one_shard_and_one_stage() -> None:
    assert not list(rules.one_shard_and_one_stage(parallel()))
    found = list(rules.one_shard_and_one_stage(parallel(tensor=2, pipeline=4)))
    assert [(p.field, p.value) for p in found] == [
        ("parallel.tensor", "2"),
        ("parallel.pipeline", "4"),
    ]


@pytest.mark.parametrize(
    ("keys", "tensor", "field", "remedy"),
    [
        ({"num_attention_heads": 3}, 2, "num_attention_heads", "nearest: 2 or 4"),
        ({"ffn_hidden_size": 63}, 2, "ffn_hidden_size", "nearest: 62 or 64"),
        ({"vocab_size_multiple": 64, "num_attention_heads": 6, "ffn_hidden_size": 48}, 3,
         "vocab_size_multiple", "nearest: 63 or 66; or parallel.tensor: 2 or 4"),
    ],
)  # fmt: skip
def test_layers_divide_by_tensor(
    keys: dict[str, int], tensor: int, field: str, remedy: str
) -> None:
    found = only(rules.layers_divide_by_tensor(model(**keys), parallel(tensor=tensor)))
    assert found.startswith(f"model.{field} = {keys[field]}: must be divisible")
    assert remedy in found
    assert not list(rules.layers_divide_by_tensor(model(**keys), parallel(tensor=1)))


@pytest.mark.parametrize(
    ("groups", "tensor", "is_sound"),
    [(1, 2, True), (2, 4, True), (4, 2, True), (3, 2, False), (2, 3, False), (6, 4, False)],
)
def test_query_groups_divide_by_tensor(groups: int, tensor: int, is_sound: bool) -> None:
    shape = model(num_query_groups=groups, num_attention_heads=12)
    found = list(rules.query_groups_divide_by_tensor(shape, parallel(tensor=tensor)))
    assert (not found) == is_sound


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
    found = list(rules.global_batch_divides(sizes, parallel(data=data)))
    assert bool(found) == (batch % (micro * data) != 0)


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


def test_train_samples_are_whole_steps() -> None:
    rule = rules.train_samples_are_whole_steps
    assert not list(rule(training()))
    assert not list(rule(training(train_iters=None, train_samples=8)))
    found = only(rule(training(train_iters=None, train_samples=10)))
    assert "divisible by training.global_batch_size = 4; nearest: 8 or 12" in found


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
        "parallel": parallel(tensor=2),
        "training": training(global_batch_size=5),
    }
    fields = {problem.field for problem in rules.broken_rules(sections)}
    assert fields == {
        "model.hidden_size",
        "model.num_attention_heads",
        "parallel.tensor",
        "training.global_batch_size",
    }
    del sections["model"]
    fields = {problem.field for problem in rules.broken_rules(sections)}
    assert fields == {"parallel.tensor", "training.global_batch_size"}


def test_every_rule_of_the_module_is_run() -> None:
    written = {
        name
        for name, value in vars(rules).items()
        if callable(value)
        and getattr(value, "__module__", "") == rules.__name__
        and name not in ("broken_rules",)
    }
    run = {rule.__name__ for rule in rules.ALL_RULES if rule.__module__ == rules.__name__}
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
