"""Sharded training against the plain formulas on one process: loss, gradient norm and weights.

Three AdamW steps with clipping in many layouts. Before each step a validation, which must see the
weights of that step; all memory that is taken anew holds what is no number.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.model.loss import MicroBatch
from lib.model.recompute import Recompute
from lib.optim.optimizer import build_optimizer, set_learning_rate
from lib.parallel.collectives import all_reduce
from lib.parallel.data_parallel import DataParallel, Unit
from lib.parallel.masters import create_masters, fill_shard
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import local, named_parts, replica
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import one_forward_one_backward
from tests.distributed import run_on_ranks
from tests.model.models import CONFIGS, VOCAB_SIZE, drawn_tokens, rough_weights
from tests.optim.clipped import clip_gradients
from tests.parallel.engine import make_engine, poisoned_memory
from tests.reference import PlainTrainer

_STEPS, _ROWS, _LENGTH = 3, 8, 10
_RATES = (3e-3, 1e-2, 5e-3)
_MAX_NORM, _DECAY = 0.5, 0.1
SHARDINGS = ["optimizer", "gradients", "parameters"]


def config_of(name, kv_heads=4):
    return CONFIGS[name].model_copy(update={"num_query_groups": kv_heads})


def data_of_step(step):
    """Rows of unequal numbers of counted tokens, one of them with none (B36, B41).

    In the second step the later half counts nothing: with micro batches of 4 rows on two ranks,
    that is all of one rank's data.
    """
    tokens, labels = drawn_tokens(100 + step, _ROWS, _LENGTH)
    counted = torch.ones(_ROWS, _LENGTH, dtype=torch.float64)
    counted[0, 1:], counted[3], counted[5, 4:] = 0, 0, 0
    if step == 1:
        counted[_ROWS // 2 :] = 0
    return tokens, labels, counted


def micro_batches_of_rank(step, rows, dp, dtype):
    mine = [row for row in range(_ROWS) if row // rows % dp.size == dp.rank]
    tokens, labels, counted = (x[mine] for x in data_of_step(step))
    return [
        MicroBatch(t.T, y.T, w.T.to(dtype), int(w.sum()))
        for t, y, w in zip(tokens.split(rows), labels.split(rows), counted.split(rows), strict=True)
    ]


def train_on_rank(config, rows, layout, dtype=torch.float64, options=None):
    """Losses and norms of the steps, and the weights at the end."""
    layout = {"tensor": 1, "data": dist.get_world_size() // layout.get("tensor", 1)} | layout
    mesh = build_mesh("cpu", pipeline=1, **layout)
    with poisoned_memory():
        return train(make_engine(config, mesh, dtype, **(options or {})), rows, dtype)


def train(engine, rows, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    masters, groups = engine.masters, engine.groups
    parameters = dict(engine.model.named_parameters())
    places = {name: value.grad.data_ptr for name, value in parameters.items()}
    optimizer = build_optimizer(
        list(masters.values()), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=_DECAY
    )
    history = []
    for step in range(_STEPS):
        batches = micro_batches_of_rank(step, rows, groups.dp, wide)
        count = torch.tensor(float(sum(batch.num_tokens for batch in batches)))
        count = all_reduce(count.double(), groups.dp).item()
        validation = engine.validate(batches)
        losses = engine.step(batches, 1.0 / count)
        # B69: validation of the training batch before the update is the training loss.
        assert torch.equal(torch.stack(validation), torch.stack(losses))
        loss = all_reduce(torch.stack(losses).double().sum(), groups.dp).item() / count
        norm = clip_gradients(masters.values(), _MAX_NORM, groups)
        assert all(value.grad.dtype == value.dtype == wide for value in masters.values())
        set_learning_rate(optimizer, _RATES[step])
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, norm))
    for name, value in engine.model.named_parameters():
        assert value is parameters[name]
        assert value.dtype == dtype
        assert value.grad.dtype == wide
        assert value.grad.data_ptr() == places[name]()
    return history, {name: value.detach().full_tensor() for name, value in masters.items()}


def by_formulas(config):
    trainer = PlainTrainer(
        rough_weights(config), config, VOCAB_SIZE, max_norm=_MAX_NORM, weight_decay=_DECAY
    )
    history = [trainer.step(*data_of_step(step), lr=rate) for step, rate in enumerate(_RATES)]
    return history, trainer.weights


def assert_trained_alike(ranks, config, *, rtol=1e-9, atol=1e-10):
    history, weights = by_formulas(config)
    assert history[0][1] > _MAX_NORM  # clipping had something to do
    for rank_history, rank_weights in ranks:
        for found, truth in zip(rank_history, history, strict=True):
            assert found == pytest.approx(truth, rel=rtol)
        assert set(rank_weights) == set(weights)
        for key, value in weights.items():
            torch.testing.assert_close(rank_weights[key].double(), value, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "data", "tensor"),
    [
        *((name, 1, 1) for name in sorted(CONFIGS)),
        ("gpt2", 2, 2),
        ("qwen", 2, 2),
        pytest.param("llama", 2, 2, marks=pytest.mark.layouts),
    ],
)
def test_float64_training_is_exact_in_every_layout(name, data, tensor):
    config = config_of(name)
    ranks = run_on_ranks(data * tensor, train_on_rank, config, 2, {"tensor": tensor})
    assert_trained_alike(ranks, config)


@pytest.mark.parametrize(
    "data_shard", [2, *(pytest.param(n, marks=pytest.mark.layouts) for n in (1, 4))]
)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_what_is_sharded_over_which_ranks_does_not_matter(sharding, data_shard):
    config, options = config_of("llama"), {"sharding": sharding}
    args = (config, 1, {"data_shard": data_shard}, torch.float64, options)
    assert_trained_alike(run_on_ranks(4, train_on_rank, *args), config)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    "sharding",
    ["optimizer", "parameters", pytest.param("gradients", marks=pytest.mark.layouts)],
)
def test_micro_batch_size_does_not_matter(rows, sharding):
    config, options = config_of("gpt2"), {"sharding": sharding}
    ranks = run_on_ranks(2, train_on_rank, config, rows, {}, torch.float64, options)
    assert_trained_alike(ranks, config)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    "recompute",
    [Recompute("selective"), Recompute("full", "uniform", 1), Recompute("full", "uniform", 2)],
    ids=["selective", "each", "both"],
)
def test_parameters_are_there_when_layers_are_computed_again(sharding, recompute):
    config, options = config_of("qwen"), {"sharding": sharding, "recompute": recompute}
    ranks = run_on_ranks(2, train_on_rank, config, 2, {}, torch.float64, options)
    assert_trained_alike(ranks, config)


# (name, key heads, tensor-parallel ranks, data-parallel ranks)
_FEW_HEADS = [("gpt2", 1, 2, 1), ("llama", 2, 4, 1), ("qwen", 1, 2, 2)]


@pytest.mark.parametrize(("name", "kv_heads", "tensor", "data"), _FEW_HEADS)
@pytest.mark.parametrize(
    "sharding",
    ["optimizer", "parameters", pytest.param("gradients", marks=pytest.mark.layouts)],
)
def test_ranks_that_share_a_key_head_add_up_their_gradients(name, kv_heads, tensor, data, sharding):
    """Fault: a step found the sum of the one before where the rank itself computes nothing."""
    config, options = config_of(name, kv_heads), {"sharding": sharding}
    args = (config, 2, {"tensor": tensor}, torch.float64, options)
    assert_trained_alike(run_on_ranks(data * tensor, train_on_rank, *args), config)


@pytest.mark.parametrize(
    ("name", "kv_heads", "data", "sharding"),
    [
        ("gpt2", 4, 1, "optimizer"),
        ("qwen", 1, 1, "optimizer"),
        ("gpt2", 4, 2, "gradients"),
        ("qwen", 1, 2, "parameters"),
    ],
)
def test_parts_of_gradients_are_summed_under_sequence_parallelism(name, kv_heads, data, sharding):
    config, options = config_of(name, kv_heads), {"sharding": sharding, "sequence": True}
    ranks = run_on_ranks(2 * data, train_on_rank, config, 2, {"tensor": 2}, torch.float64, options)
    assert_trained_alike(ranks, config)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (2, 2)])
def test_fp32_training_is_within_rounding(data, tensor):
    # Not gpt2: its key biases have a gradient of zero (softmax does not see them), and AdamW
    # turns the rounding of zero into a step of size lr.
    config = config_of("qwen")
    args = (config, 2, {"tensor": tensor}, torch.float32)
    ranks = run_on_ranks(data * tensor, train_on_rank, *args)
    assert_trained_alike(ranks, config, rtol=1e-5, atol=1e-5)


def norm_on_rank(rows, sharding):
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    engine = make_engine(config_of("gpt2"), mesh, torch.bfloat16, sharding)
    batches = micro_batches_of_rank(0, rows, engine.groups.dp, torch.float32)
    engine.step(batches, 1.0 / data_of_step(0)[2].sum().item())
    masters = engine.masters.values()
    assert all(value.grad.dtype == value.dtype == torch.float32 for value in masters)
    assert all(value.dtype == torch.bfloat16 for value in engine.model.parameters())
    return clip_gradients(masters, 0.0, engine.groups)


def test_bf16_gradient_norm_is_near_the_truth_for_every_split():
    """B39: nearly independent of the number of micro batches, since they add up in fp32."""
    truth = by_formulas(config_of("gpt2"))[0][0][1]
    cases = ((1, 8, "optimizer"), (1, 1, "optimizer"), (2, 2, "optimizer"), (2, 1, "parameters"))
    norms = [run_on_ranks(size, norm_on_rank, *args)[0] for size, *args in cases]
    for norm in norms:
        assert norm == pytest.approx(truth, rel=2 * torch.finfo(torch.bfloat16).eps)
        assert norm == pytest.approx(norms[0], rel=torch.finfo(torch.bfloat16).eps / 2)


class OneWeight(nn.Module):
    """The gradient of its weight is what it is fed."""

    def __init__(self, group):
        super().__init__()
        self.weight = replica((4,), group)

    def forward(self, x):
        assert self.weight.dtype == torch.bfloat16
        assert self.weight.eq(1).all()
        return (self.weight * x.to(self.weight.dtype)).sum()


def accumulate_on_rank(contributions, sharding):
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    groups = groups_of(mesh)
    model = OneWeight(groups.tp)
    parts = dict(named_parts(model))
    masters = create_masters({"weight": parts["weight"].cut}, mesh, torch.float32)
    fill_shard(masters["weight"], torch.ones(4), mesh)
    unit = Unit((model,), lasts=True)
    engine = DataParallel([[unit]], parts, masters, torch.bfloat16, groups, sharding)
    for _ in range(2):  # the second step finds what the first one left
        masters["weight"].grad = None
        engine.start(trains=True)
        run_plan(
            one_forward_one_backward(0, 1, len(contributions)),
            lambda _chunk, number, _: model(torch.full((4,), contributions[number])),
            before_backward=lambda chunk, last: engine.before_backward(chunk, is_last=last),
            after_backward=engine.after_backward,
        )
        assert masters["weight"].grad is None
        engine.finish()
    gradient = masters["weight"].grad
    return gradient.dtype, gradient.full_tensor(), local(gradient).numel()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "contributions", [[256.0, 1.0], [1.0] * 257, [256.0] + [1.0] * 256], ids=["2", "257", "512"]
)
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_bf16_contributions_add_up_in_fp32(size, contributions, sharding):
    """B39: in bf16, 256 + 1 is 256."""
    for dtype, total, count in run_on_ranks(size, accumulate_on_rank, contributions, sharding):
        assert dtype == torch.float32
        assert total.eq(sum(contributions) * size).all()
        assert count == 4 // size
