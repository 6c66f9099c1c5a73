"""Number types of a whole run: fp16 with its loss scale, bf16 sums, the same on every layout."""

import math

import pytest
import torch

from lib.optim.grad_scaler import STUCK_STEPS
from lib.parallel.storage import local
from lib.train.step import Progress, train_step
from tests.distributed import run_on_ranks
from tests.train.tiny_run import build_tiny, run_tiny, stored_whole, tiny_config, write_tokens

# A scale that no gradient of this run survives: fp16 ends at 65504, and the largest gradient of a
# logit is scale / 128 tokens. Down to one that fits takes about 40 halvings.
_HUGE = 2.0**60
_STEPS = 50
_FP16 = {
    "precision__compute": "fp16",
    "precision__initial_loss_scale": _HUGE,
    "training__train_iters": _STEPS,
    "schedule__decay_iters": _STEPS,
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def steps_on_rank(config_text):
    """Rows of all steps and which of them changed any weight; progress at the end."""
    parts = build_tiny(config_text)
    progress, rows, changed = Progress(), [], []
    before = stored_whole(parts)
    for _ in range(parts.config.training.train_iters):
        row = train_step(parts, progress)
        after = stored_whole(parts)
        changed.append(any(not torch.equal(after[name], before[name]) for name in after))
        rows.append(row.as_row())
        before = after
    parts.close()
    taken = {int(state["step"].item()) for state in parts.optimizer.state.values()}
    dtypes = {value.dtype for value in parts.model.parameters.values()}
    return {
        "rows": rows,
        "changed": changed,
        "progress": progress,
        "taken": taken,
        "dtypes": dtypes,
        "next_scale": parts.loss_scale.scale,
    }


def steps(manifest, ranks=1, **changes):
    config = tiny_config(manifest, **(_FP16 | changes))
    return run_on_ranks(ranks, steps_on_rank, config.to_json(), timeout=150)


def column(rank, name):
    return [row[name] for row in rank["rows"]]


def by_the_rule(skipped, hysteresis):
    """The scale of each step and of the one after, by A.11, for a run that skipped these steps."""
    scale, left, scales = _HUGE, hysteresis, []
    for is_skipped in skipped:
        scales.append(scale)
        left -= is_skipped
        if is_skipped and left <= 0:
            scale /= 2
    return [*scales, scale]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_overflowed_steps_are_skipped_until_the_scale_fits(manifest, hysteresis):
    (run,) = steps(manifest, precision__loss_scale_hysteresis=hysteresis)
    skipped = column(run, "skipped")
    count = sum(skipped)
    assert 30 < skipped.index(0) < 46
    assert sum(skipped[skipped.index(0) :]) < 3  # at the edge a later batch may overflow again
    assert run["changed"] == [not one for one in skipped]
    assert run["taken"] == {_STEPS - count}  # AdamW's bias corrections count true steps only
    assert [*column(run, "loss_scale"), run["next_scale"]] == by_the_rule(skipped, hysteresis)
    assert column(run, "nan") == [0] * _STEPS
    assert (run["progress"].skipped, run["progress"].nan) == (count, 0)
    assert column(run, "consumed_samples") == [8 * step for step in range(1, _STEPS + 1)]
    assert all(math.isfinite(loss) for loss in column(run, "loss"))
    assert [math.isfinite(norm) for norm in column(run, "grad_norm")] == run["changed"]
    assert run["dtypes"] == {torch.float32}


def test_a_scale_that_fits_gives_the_run_of_fp32(manifest):
    """Loss and norm are those of fp32 but for fp16's rounding: the scale is taken off again."""
    short = {"training__train_iters": 6, "schedule__decay_iters": 6}
    (exact,) = steps(manifest, precision__compute="fp32", **short)
    for scale in (1.0, 2.0**14):
        (run,) = steps(manifest, precision__loss_scale=scale, **short)
        assert column(run, "loss_scale") == [scale] * 6
        assert column(run, "skipped") == [0] * 6
        assert column(run, "loss") == pytest.approx(column(exact, "loss"), rel=2e-3)
        assert column(run, "grad_norm") == pytest.approx(column(exact, "grad_norm"), rel=2e-2)
        assert column(run, "loss") != column(exact, "loss")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"parallel__data": 2}),
        pytest.param(2, {"parallel__tensor": 2}, marks=pytest.mark.layouts),
        pytest.param(
            2, {"parallel__tensor": 2, "parallel__sequence": True}, marks=pytest.mark.layouts
        ),
        pytest.param(2, {"parallel__pipeline": 2}, marks=pytest.mark.layouts),
    ],
    ids=["data", "tensor", "sequence", "pipeline"],
)
def test_every_layout_skips_the_same_steps_at_the_same_scales(manifest, ranks, layout):
    (alone,) = steps(manifest)
    for rank in steps(manifest, ranks, **layout):
        for name in ("skipped", "loss_scale", "nan", "consumed_samples"):
            assert column(rank, name) == column(alone, name)
        assert rank["changed"] == alone["changed"]
        assert rank["taken"] == alone["taken"]
        assert rank["next_scale"] == alone["next_scale"]
        assert column(rank, "loss") == pytest.approx(column(alone, "loss"), rel=2e-3)


@pytest.mark.parametrize(
    ("scales", "remedy"),
    [
        ({"precision__min_loss_scale": _HUGE}, "Set precision.compute to bf16"),
        ({"precision__loss_scale": _HUGE}, "set precision.loss_scale lower, or to null"),
    ],
    ids=["floor", "fixed"],
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.layouts)])
def test_a_scale_that_cannot_fall_stops_the_run(manifest, ranks, scales, remedy):
    """B37."""
    with pytest.raises(AssertionError) as caught:
        steps(manifest, ranks, **scales)
    text = str(caught.value)
    assert "lib.errors.UserError: " in text
    assert f"{STUCK_STEPS} steps in a row overflowed fp16 and were skipped" in text
    assert remedy in text
    assert "finite numbers" not in text  # not taken for a model that diverged


def spoilt_on_rank(config_text):
    """A step with an infinite weight after a good one."""
    parts = build_tiny(config_text)
    progress = Progress()
    train_step(parts, progress)
    with torch.no_grad():
        local(parts.model.parameters["final_layernorm.weight"]).fill_(float("inf"))
    row = train_step(parts, progress)
    parts.close()
    return row.as_row(), progress


def test_a_loss_that_is_not_finite_is_the_models_fault(manifest):
    """Unlike an overflow, which is the scale's: the one is counted as nan, the other not."""
    config = tiny_config(manifest, precision__compute="fp16", precision__loss_scale=128.0)
    row, progress = run_on_ranks(1, spoilt_on_rank, config.to_json())[0]
    assert (row["skipped"], row["nan"]) == (1, 1)
    assert (progress.skipped, progress.nan, progress.nan_in_a_row) == (1, 1, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_norm_does_not_depend_on_the_micro_batch(manifest, ranks):
    """B39: 64 gradients of a sample each, added up in bf16, would lose some percent."""
    norms = []
    for size in (64 // ranks, 1):
        config = tiny_config(
            manifest,
            precision__compute="bf16",
            training__global_batch_size=64,
            training__micro_batch_size=size,
            training__train_iters=2,
            schedule__warmup_iters=0,
        )
        rows = run_on_ranks(ranks, run_tiny, config.to_json(), timeout=120)[0]["rows"]
        norms.append([row["grad_norm"] for row in rows])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert norms[1] != norms[0]
