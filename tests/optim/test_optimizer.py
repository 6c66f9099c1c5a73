"""AdamW against its formula; which parameters decay."""

import math

import pytest
import torch
from torch import nn

from lib.optim.optimizer import build_optimizer, decay_table, decays, set_learning_rate
from tests.model.models import CONFIGS, build
from tests.stored import values_of


def optimizer_of(parameters, *, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1):
    return build_optimizer(
        list(parameters.values()), betas=betas, epsilon=epsilon, weight_decay=weight_decay
    )


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_only_matrices_decay(name):
    """B40: lr 0.1, decay 0.1, gradients zero: matrices shrink by 1 %, all else stays."""
    values = values_of(build(CONFIGS[name]).double())
    parameters = {key: nn.Parameter(value) for key, value in values.items()}
    optimizer = optimizer_of(parameters)
    before = {key: value.detach().clone() for key, value in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    one_rounding = torch.finfo(torch.float64).eps
    for key, value in parameters.items():
        if "layernorm" in key or key.endswith("bias"):
            assert torch.equal(value, before[key])
            assert not decays(value)
        else:
            torch.testing.assert_close(value, before[key] * 0.99, rtol=one_rounding, atol=0)
            assert decays(value)


def by_formula(start, gradients, *, rates, betas, epsilon, decay):
    """The docstring's formulas on one number, in Python's float64."""
    weight, mean, square = start, 0.0, 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        direction = mean / (1 - betas[0] ** step)
        direction /= math.sqrt(square / (1 - betas[1] ** step)) + epsilon
        weight -= rate * (decay * weight + direction)
    return weight


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
def test_adamw_is_the_formula(betas, epsilon):
    generator = torch.Generator().manual_seed(5)
    matrix = nn.Parameter(torch.randn(2, 3, generator=generator, dtype=torch.float64))
    vector = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))
    starts = matrix.detach().clone(), vector.detach().clone()
    rates = [0.0, 1e-3, 5e-2, 1e-2, 3e-3]
    optimizer = optimizer_of(
        {"matrix": matrix, "vector": vector}, betas=betas, epsilon=epsilon, weight_decay=0.3
    )
    history = []
    for rate in rates:
        grads = [
            torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in (matrix, vector)
        ]
        matrix.grad, vector.grad = grads
        history.append([grad.clone() for grad in grads])
        set_learning_rate(optimizer, rate)
        optimizer.step()
    for place, (parameter, start, decay) in enumerate(
        ((matrix, starts[0], 0.3), (vector, starts[1], 0.0))
    ):
        for entry in range(parameter.numel()):
            expected = by_formula(
                start.view(-1)[entry].item(),
                [grads[place].reshape(-1)[entry].item() for grads in history],
                rates=rates,
                betas=betas,
                epsilon=epsilon,
                decay=decay,
            )
            found = parameter.detach().view(-1)[entry].item()
            assert math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-14)


def test_the_first_step_has_the_size_of_the_rate():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of({"weight": parameter})
    parameter.grad = torch.tensor([1e-4, -5.0, 300.0])
    set_learning_rate(optimizer, 0.01)
    optimizer.step()
    # 1e-4 / (1e-4 + epsilon) is 1 - 1e-4.
    torch.testing.assert_close(
        parameter.detach(), torch.tensor([-0.01, 0.01, -0.01]), rtol=2e-4, atol=0
    )


def test_moments_of_fp32_weights_are_fp32():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_of({"weight": parameter})
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert parameter.detach().eq(1).all()  # the rate is 0 until one is set


def test_every_group_gets_the_rate_and_every_parameter_is_in_one_group():
    parameters = values_of(build(CONFIGS["gpt2"]))
    optimizer = optimizer_of(parameters, weight_decay=0.25)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(members) == len({id(p) for p in members}) == len(parameters)


def test_a_model_without_vectors_has_one_group():
    assert len(optimizer_of({"weight": nn.Parameter(torch.ones(2, 2))}).param_groups) == 1


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_table_counts_every_parameter_once(name):
    parameters = values_of(build(CONFIGS[name]))
    counts = {True: 0, False: 0}
    rows = [(key, tuple(value.shape), decays(value)) for key, value in parameters.items()]
    for line in decay_table(rows):
        count = int(line.rpartition("(x ")[2].rstrip(")")) if "(x " in line else 1
        counts[" decays" in line] += count
    expected = sum(decays(parameter) for parameter in parameters.values())
    assert counts == {True: expected, False: len(parameters) - expected}


def test_a_line_of_the_table():
    rows = [
        ("layers.0.mlp.linear_fc2.weight", (4, 8), True),
        ("layers.11.mlp.linear_fc2.weight", (4, 8), True),
        ("final_layernorm.bias", (4,), False),
    ]
    assert decay_table(rows) == [
        "layers.N.mlp.linear_fc2.weight [4, 8]: decays (x 2)",
        "final_layernorm.bias [4]: no decay",
    ]
