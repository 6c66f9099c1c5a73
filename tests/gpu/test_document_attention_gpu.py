"""Attention within documents on a GPU against the formula in float64, document by document.

bf16 and fp16 go through flash attention over documents of different lengths; fp32, dropout and odd
head sizes through a mask.
"""

import numpy as np
import pytest
import torch

from lib.layers import attention_backends
from lib.layers.attention import attention_backend
from lib.layers.documents import find_documents
from lib.model.loss import token_losses
from tests.layers.test_attention import by_formula
from tests.model.models import CONFIGS, build, fill, rough_weights
from tests.model.test_documents import RULES, batch_of, factors, slow_losses
from tests.stored import gradients_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
HALF = [torch.bfloat16, torch.float16]
# Of three sequences of 200 tokens: documents of one token, of a kernel's block and of all tokens.
S = 200
CUTS = [np.array([1, 2, 66, 130, 199]), np.array([], dtype=np.int64), np.arange(7, 200, 13)]
# Roundings of scores, weights, result, and of what comes back in backward. Half precision rounds
# a few numbers on the way; wider types round every step of sums of up to 200 terms.
ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 16, torch.float64: 16}


@pytest.fixture(autouse=True)
def full_fp32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def flash_calls(monkeypatch):
    """Counts what goes through flash attention."""
    calls = []
    plain = attention_backends._document_by_document

    def counted(*arguments):
        calls.append(1)
        return plain(*arguments)

    monkeypatch.setattr(attention_backends, "_document_by_document", counted)
    return calls


def inputs_of(heads, groups, size, dtype):
    generator = torch.Generator().manual_seed(heads * size)
    shapes = [(S, len(CUTS), count, size) for count in (heads, groups, groups)]
    drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in drawn]


def outputs(core, inputs, documents):
    """Output and gradients of queries, keys and values, float64 on the CPU."""
    output = core(*inputs, documents)
    upstream = torch.linspace(-1.0, 1.0, output.numel()).view(output.shape)
    # The same rounded numbers for all: what is compared is the work of one kernel.
    upstream = upstream.to(torch.float16).to(torch.bfloat16).to(output)
    found = torch.autograd.grad(output, inputs, upstream)
    return [x.detach().double().cpu() for x in (output, *found)]


def relative_error(found, truth):
    """Norm of the difference over the norm; single entries near zero say nothing."""
    return ((found.detach().double().cpu() - truth).norm() / truth.norm()).item()


def compare(heads, groups, size, dtype, backend="auto"):
    inputs = inputs_of(heads, groups, size, dtype)
    on_gpu = [x.detach().to(CUDA).requires_grad_() for x in inputs]
    core = attention_backend(backend)
    found = outputs(lambda *x: core(*x[:3], 0.0, x[3]), on_gpu, find_documents(CUTS, S).to(CUDA))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = outputs(by_formula, exact, CUTS)
    error = ROUNDINGS[dtype] * torch.finfo(dtype).eps
    for one, expected in zip(found, truth, strict=True):
        assert relative_error(one, expected) < error
        assert (one - expected).abs().max() < 8 * error * expected.abs().max()


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 64), (4, 2, 128), (6, 1, 40)])
@pytest.mark.parametrize("dtype", HALF)
def test_documents_of_different_lengths(flash_calls, heads, groups, size, dtype):
    compare(heads, groups, size, dtype)
    assert flash_calls == [1]


@pytest.mark.parametrize(
    ("size", "dtype"), [(64, torch.float32), (12, torch.bfloat16), (64, torch.float64)]
)
@pytest.mark.parametrize("groups", [4, 2])
def test_masked_elsewhere(flash_calls, groups, size, dtype):
    compare(4, groups, size, dtype)
    assert flash_calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_spelt_out(dtype):
    compare(4, 2, 32, dtype, backend="reference")


@pytest.mark.parametrize("dtype", HALF)
def test_a_token_changes_nothing_outside_its_document(dtype):
    core, documents = attention_backend("auto"), find_documents(CUTS, S).to(CUDA)
    q, k, v = (x.detach().to(CUDA) for x in inputs_of(4, 2, 64, dtype))
    base = core(q, k, v, 0.0, documents)
    for place in (0, 1, 65, 66, 198):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[place, 0] += 1.0
        output = core(*changed, 0.0, documents)
        end = min(cut for cut in (*CUTS[0].tolist(), S) if cut > place)
        same = output[:, 0].eq(base[:, 0]).all(-1)
        assert same[:place].all()
        assert same[end:].all()
        assert not same[place]
        assert torch.equal(output[:, 1:], base[:, 1:])


def test_dropout_within_documents(flash_calls):
    core, documents = attention_backend("auto"), find_documents(CUTS, S).to(CUDA)
    inputs = [x.detach().to(CUDA) for x in inputs_of(4, 4, 64, torch.bfloat16)]
    torch.manual_seed(3)
    first = core(*inputs, 0.5, documents)
    torch.manual_seed(3)
    assert torch.equal(first, core(*inputs, 0.5, documents))
    assert not torch.equal(first, core(*inputs, 0.5, documents))
    # A document of one token has one weight: dropped, or doubled (exact in bf16).
    output, value = first[0, 0].unflatten(0, (4, 64)), inputs[2][0, 0]
    assert (output.eq(0).all(-1) | output.eq(2 * value).all(-1)).all()
    assert flash_calls == []


def test_deterministic_kernels_give_the_same_bits():
    inputs = [x.detach().to(CUDA).requires_grad_() for x in inputs_of(4, 2, 64, torch.bfloat16)]
    documents, core = find_documents(CUTS, S).to(CUDA), attention_backend("auto")
    torch.use_deterministic_algorithms(mode=True)
    try:
        runs = [outputs(lambda *x: core(*x[:3], 0.0, x[3]), inputs, documents) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(mode=False)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_memory_does_not_grow_with_the_square_of_the_sequence():
    """A mask of 32768 tokens would be 1 GiB, or more as numbers."""
    length = 32768
    q = torch.randn(length, 1, 2, 64, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    documents = find_documents([np.arange(100, length, 1000)], length).to(CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention_backend("auto")(q, q, q, 0.0, documents).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [6, 8])
def test_the_model_from_windows_to_gradients(flash_calls, name, dtype, size):
    """Heads of 6 take the mask, heads of 8 take flash attention in bf16."""
    config, rules = CONFIGS[name].model_copy(update={"head_dim": size}), RULES["both"]
    model = build(config)
    fill(model, rough_weights(config))
    model.to(device=CUDA, dtype=dtype)
    losses = token_losses(model, batch_of(rules).pinned().to(CUDA))
    (losses.T * factors().to(losses)).sum().backward()
    assert len(flash_calls) == (config.num_layers if (size, dtype) == (8, torch.bfloat16) else 0)
    weights = {key: value.requires_grad_() for key, value in rough_weights(config).items()}
    expected = slow_losses(weights, config, rules)
    (expected * factors()).sum().backward()
    eps = torch.finfo(dtype).eps
    assert relative_error(losses.T, expected) < 16 * eps
    gradients = gradients_of(model)
    assert set(gradients) == set(weights)
    found = torch.cat([value.reshape(-1) for value in gradients.values()])
    truth = torch.cat([weights[key].grad.reshape(-1) for key in gradients])
    assert relative_error(found, truth) < 32 * eps
