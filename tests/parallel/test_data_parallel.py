"""Sharded training against the plain formulas on one process: loss, gradient norm and weights.

Three AdamW steps with clipping, at data-parallel 1 and 2 and tensor-parallel 1 and 2.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.model.loss import MicroBatch, token_losses
from lib.optim.clipping import clip_gradients
from lib.optim.optimizer import build_optimizer, set_learning_rate
from lib.parallel.collectives import all_reduce
from lib.parallel.data_parallel import reshard, set_gradient_sync, shard_data_parallel
from lib.parallel.mesh import build_mesh, data_mesh, groups_of
from lib.parallel.storage import local, replica, store_on_mesh
from lib.pipeline.executor import run_plan
from lib.pipeline.schedule import forward_only, one_forward_one_backward
from tests.distributed import run_on_ranks
from tests.model.models import (
    CONFIGS,
    GPT2,
    VOCAB_SIZE,
    build,
    drawn_tokens,
    fill,
    rough_weights,
)
from tests.reference import PlainTrainer

_STEPS, _ROWS, _LENGTH = 3, 8, 9
_RATES = (3e-3, 1e-2, 5e-3)
_MAX_NORM, _DECAY = 0.5, 0.1


def config_of(name):
    return CONFIGS[name].model_copy(update={"num_query_groups": 4})


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


def sharded_model(name, mesh, compute_dtype, master_dtype, sharding="optimizer"):
    config = config_of(name)
    model = build(config, tp=groups_of(mesh).tp)
    fill(model, rough_weights(config))
    model.to(master_dtype)
    store_on_mesh(model, mesh["tp"])
    shard_data_parallel(model, model.layers.values(), data_mesh(mesh), compute_dtype, sharding)
    return model


def train_on_rank(
    name, tensor, rows, compute_dtype, master_dtype, sharding="optimizer", data_shard=None
):
    data = dist.get_world_size() // tensor
    mesh = build_mesh("cpu", tensor=tensor, pipeline=1, data=data, data_shard=data_shard)
    groups = groups_of(mesh)
    model = sharded_model(name, mesh, compute_dtype, master_dtype, sharding)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(
        list(parameters.values()), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=_DECAY
    )
    history = []
    for step in range(_STEPS):
        batches = micro_batches_of_rank(
            step, rows, groups.dp, torch.promote_types(master_dtype, torch.float32)
        )
        count = torch.tensor(float(sum(batch.num_tokens for batch in batches)))
        count = all_reduce(count.double(), groups.dp).item()
        validation = run_plan(
            forward_only(len(batches)),
            lambda _chunk, number, _, batches=batches: token_losses(model, batches[number]).sum(),
        )
        reshard(model)
        losses = run_plan(
            one_forward_one_backward(0, 1, len(batches)),
            lambda _chunk, number, _, batches=batches: token_losses(model, batches[number]).sum(),
            grad_scale=1.0 / count,
            before_backward=lambda _, last: set_gradient_sync(model, sharding, is_last=last),
        )
        # B69: validation of the training batch before the update is the training loss.
        assert torch.equal(torch.stack(validation), torch.stack(losses))
        loss = all_reduce(torch.stack(losses).double().sum(), groups.dp).item() / count
        norm = clip_gradients(parameters.values(), _MAX_NORM, groups)
        assert all(value.grad.dtype == master_dtype for value in parameters.values())
        set_learning_rate(optimizer, _RATES[step])
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, norm))
    assert all(value is parameters[key] for key, value in model.named_parameters())
    return history, {key: value.detach().full_tensor() for key, value in parameters.items()}


def by_formulas(name):
    config = config_of(name)
    trainer = PlainTrainer(
        rough_weights(config), config, VOCAB_SIZE, max_norm=_MAX_NORM, weight_decay=_DECAY
    )
    history = [trainer.step(*data_of_step(step), lr=rate) for step, rate in enumerate(_RATES)]
    return history, trainer.weights


def assert_trained_alike(ranks, name, *, rtol, atol):
    history, weights = by_formulas(name)
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
    args = (name, tensor, 2, torch.float64, torch.float64)
    ranks = run_on_ranks(data * tensor, train_on_rank, *args)
    assert_trained_alike(ranks, name, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "data_shard", [2, *(pytest.param(n, marks=pytest.mark.layouts) for n in (1, 4))]
)
@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "parameters"])
def test_what_is_sharded_over_which_ranks_does_not_matter(sharding, data_shard):
    args = ("llama", 1, 1, torch.float64, torch.float64, sharding, data_shard)
    assert_trained_alike(run_on_ranks(4, train_on_rank, *args), "llama", rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_micro_batch_size_does_not_matter(rows):
    ranks = run_on_ranks(2, train_on_rank, "gpt2", 1, rows, torch.float64, torch.float64)
    assert_trained_alike(ranks, "gpt2", rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (2, 2)])
def test_fp32_training_is_within_rounding(data, tensor):
    # Not gpt2: its key biases have a gradient of zero (softmax does not see them), and AdamW
    # turns the rounding of zero into a step of size lr.
    args = ("qwen", tensor, 2, torch.float32, torch.float32)
    ranks = run_on_ranks(data * tensor, train_on_rank, *args)
    assert_trained_alike(ranks, "qwen", rtol=1e-5, atol=1e-5)


def norm_on_rank(rows):
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    groups = groups_of(mesh)
    model = sharded_model("gpt2", mesh, torch.bfloat16, torch.float32)
    batches = micro_batches_of_rank(0, rows, groups.dp, torch.float32)
    run_plan(
        one_forward_one_backward(0, 1, len(batches)),
        lambda _chunk, number, _received: token_losses(model, batches[number]).sum(),
        grad_scale=1.0 / data_of_step(0)[2].sum().item(),
        before_backward=lambda _, last: set_gradient_sync(model, "optimizer", is_last=last),
    )
    assert all(value.grad.dtype == torch.float32 for value in model.parameters())
    assert all(value.dtype == torch.float32 for value in model.parameters())
    return clip_gradients(model.parameters(), 0.0, groups)


def test_bf16_gradient_norm_is_near_the_truth_for_every_split():
    """B39: nearly independent of the number of micro batches, since they add up in fp32."""
    truth = by_formulas("gpt2")[0][0][1]
    norms = [run_on_ranks(size, norm_on_rank, rows)[0] for size, rows in ((1, 8), (1, 1), (2, 2))]
    for norm in norms:
        assert norm == pytest.approx(truth, rel=2 * torch.finfo(torch.bfloat16).eps)
        assert norm == pytest.approx(norms[0], rel=torch.finfo(torch.bfloat16).eps / 2)


class OneWeight(nn.Module):
    """The gradient of its weight is what it is fed."""

    def __init__(self, group):
        super().__init__()
        self.weight = replica((4,), group)
        nn.init.ones_(self.weight)

    def forward(self, x):
        weight = local(self.weight)
        assert weight.dtype == torch.bfloat16
        return (weight * x.to(weight.dtype)).sum()


def accumulate_on_rank(contributions):
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    model = OneWeight(groups_of(mesh).tp)
    store_on_mesh(model, mesh["tp"])
    shard_data_parallel(model, [], data_mesh(mesh), torch.bfloat16)
    (stored,) = model.parameters()
    reduced_before = []

    def before_backward(_chunk, is_last):
        reduced_before.append(stored.grad is not None)
        set_gradient_sync(model, "optimizer", is_last=is_last)

    gathered_before = []

    def forward(_chunk, number, _received):
        gathered_before.append(next(model.parameters()) is not stored)
        return model(torch.full((4,), contributions[number]))

    run_plan(
        one_forward_one_backward(0, 1, len(contributions)),
        forward,
        before_backward=before_backward,
    )
    # One gather a step, which lasts until the last backward.
    assert gathered_before == [False] + [True] * (len(contributions) - 1)
    assert next(model.parameters()) is stored
    assert not any(reduced_before)  # one reduction a step, with the last micro batch
    return stored.grad.dtype, stored.grad.full_tensor()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "contributions", [[256.0, 1.0], [1.0] * 257, [256.0] + [1.0] * 256], ids=["2", "257", "512"]
)
def test_bf16_contributions_add_up_in_fp32(size, contributions):
    """B39: in bf16, 256 + 1 is 256."""
    for dtype, total in run_on_ranks(size, accumulate_on_rank, contributions):
        assert dtype == torch.float32
        assert total.eq(sum(contributions) * size).all()


def shards_on_rank():
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    model = sharded_model("gpt2", mesh, torch.bfloat16, torch.float32)
    tokens, labels = drawn_tokens(1, 1, 9)
    whole = {key: value.numel() for key, value in build(GPT2).named_parameters()}
    shares = {key: value.to_local().numel() for key, value in model.named_parameters()}
    with torch.no_grad():
        losses = model(tokens.T, labels.T)
    gathered = {value.dtype for value in model.parameters()}
    reshard(model)
    after = {key: value.to_local().numel() for key, value in model.named_parameters()}
    return whole, shares, after, losses.dtype, gathered


def test_each_rank_stores_its_share_before_and_after_a_validation():
    for whole, shares, after, dtype, _ in run_on_ranks(2, shards_on_rank):
        assert {key: 2 * count for key, count in shares.items()} == whole
        assert after == shares
        assert dtype == torch.float32  # losses, also with bf16 logits
