"""The tiny models on one GPU against the plain float64 formulas on the CPU.

Forward, gradients and one AdamW step of sharded masters on one NCCL rank, in fp32 and bf16.
"""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from lib.model.loss import MicroBatch
from lib.optim.optimizer import build_optimizer, set_learning_rate
from lib.parallel.mesh import build_mesh
from tests.model.models import CONFIGS, VOCAB_SIZE, build, drawn_tokens, fill, rough_weights
from tests.optim.clipped import clip_gradients
from tests.parallel.engine import make_engine
from tests.reference import PlainTrainer, plain_losses
from tests.stored import gradients_of

pytestmark = pytest.mark.gpu

_ROWS, _LENGTH, _RATE = 8, 11, 1e-2


@pytest.fixture(scope="module")
def device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cuda = torch.device("cuda", 0)
    torch.cuda.set_device(cuda)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=cuda)
    yield cuda
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def full_fp32_products():
    """No TF32: its 10 bits would hide errors that fp32 shows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def data():
    tokens, labels = drawn_tokens(11, _ROWS, _LENGTH)
    counted = torch.ones(_ROWS, _LENGTH, dtype=torch.float64)
    counted[0, 1:], counted[3], counted[5, 4:] = 0, 0, 0
    return tokens, labels, counted


def model_on(device, config, dtype, backend="auto"):
    model = build(config, backend=backend)
    fill(model, rough_weights(config))
    return model.to(device=device, dtype=dtype)


def relative_error(found, truth):
    """Norm of the difference over the norm; single entries near zero say nothing."""
    return ((found.double().cpu() - truth).norm() / truth.norm()).item()


# A handful of roundings of each activation in each of 2 layers; gradients see them twice.
_LAYERS_ROUNDINGS = 16


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("backend", ["sdpa", "fused_softmax", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients(device, name, backend, dtype):
    config = CONFIGS[name]
    weights = {key: value.requires_grad_() for key, value in rough_weights(config).items()}
    tokens, labels, counted = data()
    expected = plain_losses(weights, config, VOCAB_SIZE, tokens, labels)
    (expected * counted).sum().backward()
    model = model_on(device, config, dtype, backend)
    losses = model(tokens.T.to(device), labels.T.to(device))
    (losses * counted.T.to(device, torch.float32)).sum().backward()
    assert losses.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    assert relative_error(losses.T.detach(), expected.detach()) < _LAYERS_ROUNDINGS * eps
    gradients = gradients_of(model)
    assert set(gradients) == set(weights)
    whole = torch.cat([weights[key].grad.reshape(-1) for key in gradients])
    found = torch.cat([value.reshape(-1) for value in gradients.values()])
    assert relative_error(found, whole) < 2 * _LAYERS_ROUNDINGS * eps


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 2])
def test_one_step_of_sharded_masters(device, name, dtype, rows):
    config = CONFIGS[name]
    tokens, labels, counted = data()
    trainer = PlainTrainer(
        rough_weights(config), config, VOCAB_SIZE, max_norm=0.5, weight_decay=0.1
    )
    start = trainer.weights
    true_loss, true_norm = trainer.step(tokens, labels, counted, lr=_RATE)
    mesh = build_mesh("cuda", tensor=1, pipeline=1, data=1)
    engine = make_engine(config, mesh, dtype)
    parameters = engine.masters
    optimizer = build_optimizer(
        list(parameters.values()), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1
    )
    batches = [
        MicroBatch(t.T, y.T, w.T.float(), int(w.sum())).pinned().to(device)
        for t, y, w in zip(tokens.split(rows), labels.split(rows), counted.split(rows), strict=True)
    ]
    count = sum(batch.num_tokens for batch in batches)
    validation = engine.validate(batches)
    losses = engine.step(batches, 1.0 / count)
    assert torch.equal(torch.stack(validation), torch.stack(losses))
    norm = clip_gradients(parameters.values(), 0.5, engine.groups)
    assert all(value.grad.dtype == value.dtype == torch.float32 for value in parameters.values())
    assert all(value.dtype == dtype for value in engine.model.parameters())
    set_learning_rate(optimizer, _RATE)
    optimizer.step()
    eps = torch.finfo(dtype).eps
    loss = torch.stack(losses).double().sum().item() / count
    assert loss == pytest.approx(true_loss, rel=_LAYERS_ROUNDINGS * eps)
    assert norm == pytest.approx(true_norm, rel=2 * _LAYERS_ROUNDINGS * eps)
    for key, value in parameters.items():
        moved = value.detach().to_local().double().cpu() - start[key]
        expected = trainer.weights[key] - start[key]
        assert moved.abs().max() <= _RATE * (1 + 0.1 * start[key].abs().max()) * 1.001
        if dtype == torch.float32 and not key.endswith("linear_qkv.k.bias"):
            clear = expected.abs() > 0.5 * _RATE  # elsewhere the gradient is near its rounding
            assert relative_error(moved[clear], expected[clear]) < 1e-3


def test_initial_weights_are_those_of_the_cpu(device):
    on_gpu = build(CONFIGS["gpt2"]).to(device)
    for one, other in zip(on_gpu.parameters(), build(CONFIGS["gpt2"]).parameters(), strict=True):
        assert torch.equal(one.cpu(), other)
