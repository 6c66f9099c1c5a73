"""Gradients of matrix products and biases: returned, added to what is there, or replacing it."""

import pytest
import torch

from lib.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from lib.layers.parameter_gradient import overwritable, product_gradient, sum_gradient
from lib.parallel.groups import ParallelGroups
from tests.layers.on_ranks import assert_close, drawn

M, IN, OUT = 6, 3, 5
# The type of weight and activations, and of the gradient.
TYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


def leaf(shape, dtype, grad_dtype, grad=None):
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad_dtype = grad_dtype
    if grad is not None:
        parameter.grad = grad.to(grad_dtype)
    return parameter


def numbers(dtype):
    """Of the product's gradient and what was multiplied, rounded to a type; the exact result."""
    grad_MO, x_MI = drawn(1, M, OUT).to(dtype), drawn(2, M, IN).to(dtype)
    return grad_MO, x_MI, grad_MO.double().T @ x_MI.double()


@pytest.mark.parametrize(("dtype", "grad_dtype"), TYPES)
def test_the_product_is_added_to_a_gradient_that_is_there(dtype, grad_dtype):
    grad_MO, x_MI, product = numbers(dtype)
    before = drawn(3, OUT, IN).to(grad_dtype)
    weight = leaf((OUT, IN), dtype, grad_dtype, before.clone())
    place = weight.grad.data_ptr()
    assert product_gradient(weight, grad_MO, x_MI) is None
    assert weight.grad.data_ptr() == place
    assert weight.grad.dtype == grad_dtype
    assert_close(weight.grad, before.double() + product, 8 * torch.finfo(grad_dtype).eps)


@pytest.mark.parametrize(("dtype", "grad_dtype"), TYPES)
def test_the_first_product_of_a_step_takes_the_place_of_what_was_there(dtype, grad_dtype):
    grad_MO, x_MI, product = numbers(dtype)
    weight = overwritable(leaf((OUT, IN), dtype, grad_dtype, torch.full((OUT, IN), torch.nan)))
    assert weight.overwrite_grad is False
    weight.overwrite_grad = True
    place = weight.grad.data_ptr()
    for times in (1, 2):
        assert product_gradient(weight, grad_MO, x_MI) is None
        assert weight.overwrite_grad is False
        assert weight.grad.data_ptr() == place
        assert_close(weight.grad, times * product, 8 * torch.finfo(grad_dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_a_gradient_the_product_is_returned(dtype):
    grad_MO, x_MI, product = numbers(dtype)
    weight = overwritable(leaf((OUT, IN), dtype, dtype))
    found = product_gradient(weight, grad_MO, x_MI)
    assert weight.grad is None
    assert found.dtype == dtype
    assert_close(found, product, 4 * torch.finfo(dtype).eps)


def test_what_is_no_leaf_gets_its_gradient_returned():
    grad_MO, x_MI, product = numbers(torch.float64)
    weight = torch.ones(OUT, IN, dtype=torch.float64, requires_grad=True) * 2
    assert_close(product_gradient(weight, grad_MO, x_MI), product)


@pytest.mark.parametrize(("dtype", "grad_dtype"), TYPES)
def test_the_gradient_of_a_bias(dtype, grad_dtype):
    grad_MO = numbers(dtype)[0]
    total, before = grad_MO.double().sum(0), drawn(3, OUT).to(grad_dtype)
    bias = leaf((OUT,), dtype, grad_dtype, before.clone())
    assert sum_gradient(bias, grad_MO) is None
    assert_close(bias.grad, before.double() + total, 4 * torch.finfo(grad_dtype).eps)
    alone = sum_gradient(leaf((OUT,), dtype, grad_dtype), grad_MO)
    assert_close(alone, total, 4 * torch.finfo(dtype).eps)
    assert sum_gradient(None, grad_MO) is None


def test_many_small_gradients_are_not_lost_beside_a_large_one():
    """B39: in bf16, 256 + 1 is 256."""
    weight = leaf((1, 1), torch.bfloat16, torch.float32, torch.full((1, 1), 256.0))
    bias = leaf((1,), torch.bfloat16, torch.float32, torch.full((1,), 256.0))
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(100):
        product_gradient(weight, one, one)
        sum_gradient(bias, one)
    assert weight.grad.item() == bias.grad.item() == 356.0


class Twice(torch.nn.Module):
    """A layer whose weights serve twice in a pass."""

    def __init__(self, kind):
        super().__init__()
        groups = ParallelGroups()
        self.layer = RowParallelLinear(IN, IN, groups, bias=True)
        if kind == "column":
            self.layer = ColumnParallelLinear(IN, {"": (IN, 1)}, groups, bias=True)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("is_there", [False, True])
def test_layers_add_to_a_gradient_or_return_it(kind, is_there):
    model = Twice(kind).double()
    weight, bias = model.layer.weight, model.layer.bias
    for seed, parameter in enumerate((weight, bias)):
        parameter.data.copy_(drawn(seed, *parameter.shape))
        if is_there:
            parameter.grad = torch.zeros_like(parameter)
    if is_there:
        weight.grad.fill_(torch.nan)
        weight.overwrite_grad = True
    x = drawn(5, 4, 2, IN)
    for _ in range(2):  # two micro batches
        model(x).square().sum().backward()
    plain = [parameter.detach().clone().requires_grad_() for parameter in (weight, bias)]
    y = x
    for number in range(2):
        y = torch.nn.functional.linear(y, *plain)
        y = torch.tanh(y) if number == 0 else y
    (2 * y.square().sum()).backward()
    assert_close(weight.grad, plain[0].grad)
    assert_close(bias.grad, plain[1].grad)


def test_a_weight_that_is_computed_from_others_passes_its_gradient_on():
    x, scale = drawn(1, 4, 2, IN), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    weight = drawn(2, OUT, IN)
    column_parallel(x, weight * scale, None, ParallelGroups()).sum().backward()
    assert_close(scale.grad, (x @ weight.T).sum())


def test_gradients_that_are_asked_for_are_returned():
    """By ``torch.autograd.grad``, where no parameter has one yet."""
    model = Twice("column").double()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(drawn(seed, *parameter.shape))
    found = torch.autograd.grad(model(drawn(5, 4, 2, IN)).sum(), list(model.parameters()))
    assert all(gradient is not None for gradient in found)
    assert all(parameter.grad is None for parameter in model.parameters())
