"""B32: on a pipeline the last stage has a copy of the tied table, which never drifts."""

import pytest
import torch
import torch.distributed as dist

from lib.train.step import Progress, train_step
from tests.distributed import run_on_ranks
from tests.train.tiny_run import build_tiny, stored_whole, tiny_config, write_tokens

_STEPS = 5
_TABLE, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def train_on_rank(config_text):
    """Both ends' tables after the start and each step, moments at the end, losses and norms."""
    parts = build_tiny(config_text)
    progress, rows = Progress(), []
    tables = [tables_of(parts)]
    for _ in range(_STEPS):
        rows.append(train_step(parts, progress))
        tables.append(tables_of(parts))
    parts.close()
    moments = [
        parts.optimizer.state[parts.model.parameters[name]][moment].full_tensor()
        for name in sorted({_TABLE, _OUTPUT} & set(parts.model.parameters))
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    return {
        "stage": parts.groups.pp.rank,
        "tables": tables,
        "moments": moments,
        "loss": [row.loss for row in rows],
        "norm": [row.grad_norm for row in rows],
        "own": sorted(parts.model.own_parameters()),
        "rank": dist.get_rank(),
    }


def tables_of(parts):
    held = stored_whole(parts)
    return {name: held[name] for name in (_TABLE, _OUTPUT) if name in held}


def train(manifest, ranks, **changes):
    base = {"precision__compute": "fp64", "optimizer__weight_decay": 0.3, "model__init_std": 0.1}
    config = tiny_config(manifest, **(base | changes))
    return run_on_ranks(ranks, train_on_rank, config.to_json(), timeout=120)


def ends(ranks, stages):
    """One rank of the first and one of the last stage."""
    return [next(r for r in ranks if r["stage"] == stage) for stage in (0, stages - 1)]


LAYOUTS = {
    "pp2": (2, {"parallel__pipeline": 2}),
    "pp2-tp2": (4, {"parallel__pipeline": 2, "parallel__tensor": 2}),
    "pp2-dp2": (4, {"parallel__pipeline": 2, "training__micro_batch_size": 1}),
    "pp2x2": (
        2,
        {"parallel__pipeline": 2, "parallel__virtual_stages": 2, "model__num_layers": 4},
    ),
}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_copies_stay_the_same_bits_and_are_the_table_of_one_rank(manifest, name):
    size, layout = LAYOUTS[name]
    model = {key: value for key, value in layout.items() if key.startswith("model")}
    (alone,) = train(manifest, 1, **model)
    ranks = train(manifest, size, **layout)
    first, last = ends(ranks, 2)
    assert list(first["tables"][0]) == list(last["tables"][0]) == [_TABLE]
    for one, other, truth in zip(first["tables"], last["tables"], alone["tables"], strict=True):
        assert torch.equal(one[_TABLE], other[_TABLE])
        torch.testing.assert_close(one[_TABLE], truth[_TABLE], rtol=1e-9, atol=1e-12)
    for one, other in zip(first["moments"], last["moments"], strict=True):
        assert torch.equal(one, other)
    for rank in ranks:  # the copy counts once in the norm, on every rank
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-10)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-10)
    assert _TABLE in first["own"]
    assert _TABLE not in last["own"]


def test_bf16_copies_stay_the_same_bits(manifest):
    ranks = train(manifest, 2, precision__compute="bf16", parallel__pipeline=2)
    for one, other in zip(ranks[0]["tables"], ranks[1]["tables"], strict=True):
        assert torch.equal(one[_TABLE], other[_TABLE])
    moved = ranks[0]["tables"][0][_TABLE] - ranks[0]["tables"][-1][_TABLE]
    assert moved.ne(0).any()


def test_untied_tables_are_two(manifest):
    (alone,) = train(manifest, 1, model__tie_embeddings=False)
    first, last = ends(train(manifest, 2, model__tie_embeddings=False, parallel__pipeline=2), 2)
    assert list(first["tables"][0]) == [_TABLE]
    assert list(last["tables"][0]) == [_OUTPUT]
    assert _OUTPUT in last["own"]
    for one, other, truth in zip(first["tables"], last["tables"], alone["tables"], strict=True):
        assert not torch.equal(one[_TABLE], other[_OUTPUT])
        torch.testing.assert_close(one[_TABLE], truth[_TABLE], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other[_OUTPUT], truth[_OUTPUT], rtol=1e-9, atol=1e-12)
    assert first["norm"] == pytest.approx(alone["norm"], rel=1e-10)
