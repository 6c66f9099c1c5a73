"""Where each piece of advice begins: silent at its threshold, and said just beyond it."""

from collections.abc import Iterator
from inspect import isfunction
from types import ModuleType
from typing import Any

import pytest

from lib.config import advice
from lib.config.operation import CheckpointConfig
from lib.config.schema import OptimizerConfig
from lib.errors import Problem
from lib.pipeline.schedule import training_plan
from lib.pipeline.simulate import Costs, bubble_formula, simulate
from lib.train import attention_rules, machine_rules
from tests.config.conftest import Factory
from tests.config.sections import model, only, parallel, precision, schedule, training


@pytest.mark.parametrize("module", [advice, attention_rules, machine_rules])
def test_every_function_is_listed(module: ModuleType) -> None:
    written = {
        name
        for name, value in vars(module).items()
        if isfunction(value)
        and value.__module__ == module.__name__
        and value.__annotations__.get("return") == Iterator[Problem]
    }
    listed = [value for name, value in vars(module).items() if name.endswith(("RULES", "ADVICE"))]
    own = [each for rules in listed for each in rules if each.__module__ == module.__name__]
    assert {each.__name__ for each in own} == written
    assert len(own) == len(written)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (4, 2), (3, 4)])
def test_bubbles_are_those_of_the_simulated_schedule(stages: int, chunks: int) -> None:
    for micro_batches in range(1, 30):
        plans = [training_plan(stage, stages, chunks, micro_batches) for stage in range(stages)]
        share = simulate(plans, Costs.uniform(stages * chunks)).bubble_share
        layout = parallel(pipeline=stages, virtual_stages=chunks)
        batches = training(micro_batch_size=1, global_batch_size=micro_batches)
        found = list(advice.pipeline_waits_little(layout, batches, bubble_formula))
        assert bool(found) == (share > 0.2 + 1e-9)
        if found:
            enough = int(found[0].remedy.split()[0])
            more = training(micro_batch_size=1, global_batch_size=enough)
            assert not list(advice.pipeline_waits_little(layout, more, bubble_formula))


def test_copies_that_are_known_share_the_batch() -> None:
    batches = training(micro_batch_size=1, global_batch_size=8)
    assert not list(advice.pipeline_waits_little(parallel(pipeline=2), batches, bubble_formula))
    layout = parallel(pipeline=2, data=4)
    found = only(advice.pipeline_waits_little(layout, batches, bubble_formula))
    assert "wait 33% of each step, which has 2 micro batches" in found


@pytest.mark.parametrize(
    ("keys", "vocab_size", "fields"),
    [
        ({"hidden_size": 64}, 100, []),
        ({"hidden_size": 96}, 100, ["model.hidden_size"]),
        ({"hidden_size": 64, "ffn_hidden_size": 100}, 100, ["model.ffn_hidden_size"]),
        ({"hidden_size": 64, "vocab_size_multiple": 1}, 128, []),
        ({"hidden_size": 64, "vocab_size_multiple": 1}, 50257, ["model.vocab_size_multiple"]),
    ],
)
def test_sizes(keys: dict[str, Any], vocab_size: int, fields: list[str]) -> None:
    shape = model(**keys)
    for compute in ("bf16", "fp16"):
        found = advice.sizes_suit_the_gpu(shape, precision(compute=compute), vocab_size)
        assert [problem.field for problem in found] == fields
    assert not list(advice.sizes_suit_the_gpu(shape, precision(), vocab_size))


@pytest.mark.parametrize(("lr", "is_usual"), [(1e-2, True), (1.1e-2, False)])
def test_learning_rate(lr: float, is_usual: bool) -> None:
    assert (not list(advice.learning_rate_is_usual(OptimizerConfig(lr=lr)))) == is_usual


@pytest.mark.parametrize(
    ("keys", "is_small"),
    [
        ({}, True),
        ({"warmup_iters": 5}, True),
        ({"warmup_iters": 6}, False),
        ({"warmup_samples": 20}, True),
        ({"warmup_samples": 21}, False),
    ],
)
def test_warmup(keys: dict[str, int], is_small: bool) -> None:
    """Of 10 steps of 4 samples."""
    assert (not list(advice.warmup_is_a_small_part(schedule(**keys), training()))) == is_small


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({}, None),
        ({"decay_iters": 10}, None),
        ({"decay_samples": 50}, None),
        ({"decay_samples": 51}, "training ends at 78% of the decay"),
        ({"decay_iters": 8}, None),
        ({"decay_iters": 7}, "the decay ends at 70% of the training"),
        ({"decay_iters": 1, "decay": "constant"}, None),
    ],
)
def test_decay(keys: dict[str, Any], complaint: str | None) -> None:
    found = list(advice.decay_ends_with_the_training(schedule(**keys), training()))
    assert [problem.rule.partition(",")[0].partition(";")[0] for problem in found] == (
        [] if complaint is None else [complaint]
    )


def test_loss_scale_and_clipping() -> None:
    assert not list(advice.loss_scale_is_found_by_itself(precision(compute="fp16")))
    assert list(advice.loss_scale_is_found_by_itself(precision(compute="fp16", loss_scale=2)))
    assert not list(advice.gradients_are_clipped(OptimizerConfig(lr=1, clip_grad=0.1)))


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary(tied: bool) -> None:
    """2 layers of 12 h^2 weights and 5 norms of 2 h, so others weigh 778 rows of the table."""
    shape = model(tie_embeddings=tied, bias=False, position_embedding="rope")
    most = 778 if tied else 778 // 2
    rule = advice.vocabulary_does_not_dominate
    assert not list(rule(shape, training(), most))
    assert "have 50% of the weights" in only(rule(shape, training(), most + 1))


@pytest.mark.parametrize(("steps", "epochs"), [(40, 4.0), (41, 4.1)])
def test_epochs(make: Factory, steps: int, epochs: float) -> None:
    """40 samples, 4 a step."""
    run = make.run_config(training={"train_iters": steps, "global_batch_size": 4})
    found = list(advice.data_are_not_repeated_often(run))
    assert [f"read {epochs} times" in problem.rule for problem in found] == [True] * (epochs > 4)


@pytest.mark.parametrize(
    ("interval", "steps", "unsaved"),
    [(0, 1000, 0), (0, 1001, 1001), (1000, 9000, 0), (1001, 9000, 1001), (5000, 1200, 1200)],
)
def test_saves(interval: int, steps: int, unsaved: int) -> None:
    kept, length = CheckpointConfig(save_interval=interval), training(train_iters=steps)
    found = list(advice.training_is_saved(kept, length))
    assert [f"cost {unsaved:,} steps" in problem.rule for problem in found] == [True] * (
        unsaved > 0
    )


@pytest.mark.parametrize(("interval", "is_within"), [(0, True), (10, True), (11, False)])
def test_validation_interval(interval: int, is_within: bool) -> None:
    found = list(advice.validation_is_measured_on_the_way(training(eval_interval=interval)))
    assert (not found) == is_within
