"""B30, B31: random numbers of tensor-parallel ranks agree where they must and differ elsewhere."""

import pytest
import torch

from lib.train.loop import Hooks, validate
from lib.train.step import Progress, train_step
from tests.distributed import run_on_ranks
from tests.train.tiny_run import build_tiny, run_tiny, tiny_config, write_tokens

_DROPOUT = {"model__hidden_dropout": 0.2, "model__attention_dropout": 0.2}
_MOMENTS = ("start", "step 1", "step 5", "validation", "step 6")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def streams_on_rank(config_text):
    """States of the default and the shard stream at some moments; the samples' tokens too."""
    parts = build_tiny(config_text)
    progress, measured = Progress(), []
    hooks = Hooks(
        on_step=lambda _row: None,
        on_validation=measured.append,
        on_gradients=lambda _rows: None,
        save=lambda _progress: None,
        stop_requested=lambda: False,
    )
    states = [streams(parts)]
    parts.model.chunks.train()
    for _ in range(5):
        train_step(parts, progress)
        if progress.iteration in (1, 5):
            states.append(streams(parts))
    validate(parts, progress, hooks)
    states.append(streams(parts))
    train_step(parts, progress)
    states.append(streams(parts))
    parts.close()
    assert len(measured) == 1
    groups = parts.groups
    place = (groups.pp.rank, groups.dp.rank, groups.tp.rank)
    return place, dict(zip(_MOMENTS, states, strict=True))


def streams(parts):
    stream = parts.groups.shard_stream
    return {"default": torch.get_rng_state(), "shard": None if stream is None else stream.state}


def states_of(manifest, ranks, **changes):
    config = tiny_config(manifest, **_DROPOUT, training__eval_interval=100, **changes)
    return dict(run_on_ranks(ranks, streams_on_rank, config.to_json(), timeout=120))


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_share_the_default_stream_and_no_other(manifest, sequence):
    found = states_of(manifest, 2, parallel__tensor=2, parallel__sequence=sequence)
    one, other = found[0, 0, 0], found[0, 0, 1]
    for moment in _MOMENTS:
        assert torch.equal(one[moment]["default"], other[moment]["default"]), moment
        assert not torch.equal(one[moment]["shard"], other[moment]["shard"]), moment
    for rank in (one, other):
        # Under sequence parallelism everything is cut, so only the shard's stream is drawn from.
        drew = not torch.equal(rank["start"]["default"], rank["step 1"]["default"])
        assert drew != sequence
        assert not torch.equal(rank["start"]["shard"], rank["step 1"]["shard"])
        assert not torch.equal(rank["step 1"]["shard"], rank["step 5"]["shard"])
        for kind in ("default", "shard"):
            assert torch.equal(rank["step 5"][kind], rank["validation"][kind])
        assert not torch.equal(rank["validation"]["shard"], rank["step 6"]["shard"])


def test_copies_of_the_model_and_stages_draw_other_numbers(manifest):
    """And each stream of a tensor rank is its own among all ranks."""
    found = states_of(manifest, 4, parallel__tensor=2, parallel__data=2)
    found |= {
        (1, *place[1:]): states
        for place, states in states_of(
            manifest, 4, parallel__tensor=2, parallel__pipeline=2
        ).items()
        if place[0] == 1
    }
    assert len(found) == 6
    for moment in _MOMENTS:
        default = {bytes(states[moment]["default"].tolist()) for states in found.values()}
        shard = {bytes(states[moment]["shard"].tolist()) for states in found.values()}
        assert (len(default), len(shard)) == (3, 6), moment


def test_one_rank_has_the_default_stream_only(manifest):
    ((_, states),) = states_of(manifest, 1).items()
    assert all(states[moment]["shard"] is None for moment in _MOMENTS)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (2, {"parallel__tensor": 2}),
        pytest.param(2, {"parallel__pipeline": 2}, marks=pytest.mark.layouts),
    ],
    ids=["alone", "tensor", "pipeline"],
)
def test_reading_ahead_changes_no_loss(manifest, ranks, layout):
    """B31: who reads data, and how far ahead, has no part in the random numbers."""
    config = tiny_config(manifest, **_DROPOUT, **layout)
    runs = [
        run_on_ranks(ranks, run_with_prefetch, config.to_json(), count, timeout=120)[0]
        for count in (0, 1, 5)
    ]
    assert runs[0] == runs[1] == runs[2]
    plain = tiny_config(manifest, **layout).to_json()
    assert run_on_ranks(ranks, run_with_prefetch, plain, 0, timeout=120)[0] != runs[0]


def run_with_prefetch(config_text, count):
    return [row["loss"] for row in run_tiny(config_text, prefetch=count)["rows"]]
