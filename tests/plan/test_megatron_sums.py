"""From flags to parameters: batches, lengths, rates; Megatron's formulas are the truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.optim.lr_schedule import LearningRate
from tests.plan.launching import launch, problems, written

# ---- processes and batches


def test_copies_are_what_the_sizes_leave() -> None:
    more = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2}
    found = launch(launcher="torchrun --nproc_per_node 8 --nnodes 2", **more)
    assert written(found, "parallel.data", "launch.nodes") == [4, 2]
    found = launch(launcher="torchrun --nproc_per_node 8", **more, **{"context-parallel-size": 2})
    assert written(found, "parallel.data", "launch.nodes") == [1, None]
    found = launch(launcher="torchrun --nproc_per_node 6", **more)
    assert "4 must divide the 6 processes" in problems(found)


def test_the_global_batch_is_derived_as_megatron_does() -> None:
    found = launch("global-batch-size", launcher="torchrun --nproc_per_node 4")
    assert written(found, "training.global_batch_size") == [8]
    old = {"batch-size": 4, "num-microbatches-in-minibatch": 3}
    found = launch("global-batch-size micro-batch-size", "torchrun --nproc_per_node 4", **old)
    assert written(found, "training.micro_batch_size", "training.global_batch_size") == [4, 48]


def test_virtual_stages_are_counted_in_chunks() -> None:
    pipeline = {"pipeline-model-parallel-size": 2}
    chunk = {"num-layers-per-virtual-pipeline-stage": 2}
    assert written(launch(**pipeline, **chunk), "parallel.virtual_stages") == [2]
    bad = launch(**pipeline, **{"num-layers-per-virtual-pipeline-stage": 3})
    assert "must divide the 8 layers" in problems(bad)
    uneven = {"decoder-first-pipeline-num-layers": 1, "pipeline-model-parallel-size": 2}
    assert written(launch(**uneven), "parallel.layers_per_chunk") == [[1, 7]]
    uneven["pipeline-model-parallel-size"] = 3
    assert "must divide among 2" in problems(launch(**uneven))


def last_step(samples: int, batch: int, ramp: tuple[int, int, int] | None) -> int:
    """Where a run of so many samples ends, by counting its steps."""
    done = 0
    while True:
        size = batch
        if ramp is not None and done < ramp[2]:
            parts = (batch - ramp[0]) // ramp[1]
            size = ramp[0] + ramp[1] * (done * parts // ramp[2])
        if done + size > samples:
            return done
        done += size


@given(st.integers(64, 5000), st.sampled_from([None, (8, 8, 500), (16, 4, 77)]))
def test_a_run_in_samples_ends_with_its_last_whole_step(
    samples: int, ramp: tuple[int, int, int] | None
) -> None:
    more = {"rampup-batch-size": " ".join(map(str, ramp))} if ramp else {}
    found = launch("train-iters", **{"train-samples": samples}, **more)
    assert written(found, "training.train_samples") == [last_step(samples, 32, ramp)]
    assert written(found, "training.train_iters") == [None]


def test_tokens_are_samples_of_the_sequence_length() -> None:
    tokens = {"train-tokens": 128 * 3200, "lr-decay-tokens": 128 * 1600, "lr-warmup-tokens": 1280}
    found = launch("train-iters", **tokens)
    names = ("training.train_samples", "schedule.decay_samples", "schedule.warmup_samples")
    assert written(found, *names) == [3200, 1600, 10]
    sooner = launch("train-iters", **tokens, **{"train-samples": 640})
    assert written(sooner, "training.train_samples") == [640]


def test_tokens_and_iterations_end_a_run_with_whichever_comes_first() -> None:
    names = ("training.train_samples", "training.train_iters", "schedule.warmup_iters")
    decay = {"lr-decay-tokens": 128 * 64, "lr-warmup-iters": 4}  # a unit of its own for each
    found = launch(**{"train-iters": 50, "train-tokens": 128 * 3201}, **decay)
    assert not found.problems
    assert written(found, *names) == [50 * 32, None, 4]
    found = launch(**{"train-iters": 999, "train-tokens": 128 * 3201}, **decay)
    assert written(found, *names) == [3232, None, 4]  # the step that reaches them
    assert written(found, "schedule.decay_samples") == [64]


def test_old_runs_warm_up_although_no_flag_says_so() -> None:
    old = launch("micro-batch-size", **{"batch-size": 2, "lr-decay-iters": 400})
    assert written(old, "schedule.warmup_iters", "schedule.warmup_samples") == [4, None]
    assert "default" in old.settings["schedule.warmup_iters"].why
    for flags in ({"warmup": 0}, {"lr-warmup-iters": 7}):
        found = launch("micro-batch-size", **{"batch-size": 2}, **flags)
        assert written(found, "schedule.warmup_iters") == [next(iter(flags.values()))]
    assert written(launch(), "schedule.warmup_iters") == [None]


def test_steps_of_accumulation_make_the_batch() -> None:
    flags = {"gas": 3, "pipe-parallel-size": 2}
    found = launch("global-batch-size", "torchrun --nproc_per_node 8", **flags)
    names = ("training.global_batch_size", "parallel.pipeline", "parallel.data")
    assert written(found, *names) == [2 * 4 * 3, 2, 4]


# ---- the learning rate


RATES = [
    {"lr-decay-style": "cosine", "lr-warmup-fraction": 0.01, "min-lr": 1e-5},
    {"lr-decay-style": "cosine", "lr-warmup-fraction": 0.0123, "lr-decay-iters": 777},
    {"lr-warmup-iters": 20, "min-lr": 1e-4},
    {"lr-decay-style": "constant", "lr-warmup-iters": 5},
    {"lr-decay-style": "WSD", "lr-wsd-decay-iters": 100, "lr-warmup-iters": 10, "min-lr": 1e-5},
    {"lr-decay-style": "WSD", "lr-wsd-decay-iters": 90, "lr-wsd-decay-style": "minus_sqrt"},
]


@pytest.mark.parametrize("flags", RATES)
def test_the_rate_after_the_warm_up_is_megatrons(flags: dict[str, object]) -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    found = launch(**flags)
    batch, iterations = 32, 1000

    def samples(name: str, default: int) -> int:
        in_iters, in_samples = written(found, f"schedule.{name}_iters", f"schedule.{name}_samples")
        return in_samples if in_iters is None and in_samples else (in_iters or default) * batch

    ours = LearningRate(
        max_lr=1e-3,
        min_lr=found.settings["schedule.min_lr"].value,
        decay=found.settings["schedule.decay"].value,
        warmup_samples=samples("warmup", 0),
        decay_samples=samples("decay", iterations),
        wsd_decay_samples=samples("wsd_decay", 0),
        wsd_style=written(found, "schedule.wsd_style")[0] if "WSD" in flags.values() else "linear",
    )
    decay = flags.get("lr-decay-iters", iterations) * batch
    warmup = flags.get("lr-warmup-iters", 0) * batch or flags.get("lr-warmup-fraction", 0) * decay

    class Stub:
        param_groups = [{"max_lr": 1e-3, "min_lr": float(flags.get("min-lr", 0.0))}]  # noqa: RUF012

    theirs = scheduler.OptimizerParamScheduler(
        Stub(), init_lr=0.0, max_lr=1e-3, min_lr=float(flags.get("min-lr", 0.0)),
        lr_warmup_steps=warmup, lr_decay_steps=decay,
        lr_decay_style=flags.get("lr-decay-style", "linear"), start_wd=0.0, end_wd=0.0,
        wd_incr_steps=decay, wd_incr_style="constant",
        wsd_decay_steps=flags.get("lr-wsd-decay-iters", 0) * batch,
        lr_wsd_decay_style=flags.get("lr-wsd-decay-style", "exponential"),
    )  # fmt: skip
    for step in range(iterations):
        theirs.num_steps = step * batch
        if step * batch > warmup:
            expected = theirs.get_lr(Stub.param_groups[0])
            assert ours.at(step * batch, batch) == pytest.approx(expected, rel=1e-3, abs=1e-9), step


# ---- sums that do not add up


@pytest.mark.parametrize(
    ("without", "flags", "said"),
    [
        ("lr num-layers", {}, "--lr = (not given): the run needs it"),
        ("", {"train-samples": 320}, "--train-iters is given as well"),
        ("", {"lr-decay-samples": 320}, "--train-iters counts the run in iterations"),
        ("train-iters", {"train-samples": 320, "lr-warmup-iters": 2}, "counts the run in samples"),
        ("", {"lr-warmup-iters": 2, "lr-warmup-fraction": 0.1}, "is given as well"),
        ("", {"fp16": True, "bf16": True}, "keep one of the two"),
        ("", {"lr-decay-style": "WSD"}, "WSD needs it"),
        ("", {"seq-length": "0"}, "--seq-length = 0: must be 1 or more"),
        ("", {"train-iters": "-5"}, "--train-iters = -5: must be 0 or more"),
        ("", {"lr-warmup-fraction": "nan"}, "must be a number"),
        ("", {"tensor-model-parallel-size": "0"}, "must be 1 or more"),
        ("", {"num-layers": "many"}, "must be a whole number"),
        ("", {"hidden-size": "2.5"}, "must be a whole number"),
        ("", {"lr": "$LR"}, "give it: --set LR=VALUE"),
        ("", {"num-layers": "4 5"}, "does not take 5"),
        ("", {"rampup-batch-size": "8 8"}, "takes 3 numbers"),
        ("", {"rampup-batch-size": "8 8 64"}, "Megatron refuses a ramp-up"),
        ("", {"split": "100,0,0"}, "no documents are left"),
        ("data-path", {"train-data-path": "a"}, "--valid-data-path = (not given): no documents"),
        ("vocab-file", {"tokenizer-type": "GPT2BPETokenizer"}, "--vocab-file"),
        ("", {"tokenizer-type": "Llama2Tokenizer", "vocab-file": ""}, "needs a value"),
        ("train-iters", {}, "the run needs a length"),
        ("", {"train-data-path": "a"}, "keep one kind"),
    ],
)
def test_contradictions_are_named(without: str, flags: dict[str, object], said: str) -> None:
    assert said in problems(launch(without, **flags))


@pytest.mark.parametrize(
    ("without", "flags"),
    [
        ("train-iters", {"train-samples": "$N", "lr-warmup-samples": 64}),
        ("train-iters", {"lr-warmup-fraction": 0.1, "lr-decay-iters": 3}),
        ("vocab-file", {"tokenizer-type": "GPT2BPETokenizer"}),
        ("", {"rampup-batch-size": "8 8 64", "lr-warmup-iters": 2}),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem(without: str, flags: dict[str, object]) -> None:
    found = launch(without, **flags)
    assert len(found.problems) == 1
    assert not found.is_complete
    assert not found.unknown


def test_a_sound_run_has_no_problems() -> None:
    assert not launch().problems
    assert launch().is_complete
    assert not launch("lr").is_complete
