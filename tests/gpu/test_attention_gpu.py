"""Every attention backend that this GPU can run against the formula in float64; the choice.

Documents are in test_document_attention_gpu.py too, with more of what can go wrong there.
"""

import math

import numpy as np
import pytest
import torch

from lib.console import say
from lib.layers.attention import BACKENDS
from lib.layers.attention_choice import check, measure, obstacle, time_on_gpu
from lib.layers.attention_limits import AttentionCase
from lib.layers.documents import find_documents
from lib.layers.dtypes import COMPUTE_DTYPES
from lib.train.chosen_attention import Wanted, _place, choose_attention

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
B = 2
NAMES = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
# heads, key/value heads, head dimension
SHAPES = [(4, 4, 64), (4, 2, 128), (6, 1, 96), (8, 2, 64)]
LENGTHS = [128, 257]
# Roundings of scores, weights, result, and of what comes back in backward; fp32 rounds each step
# of sums of up to 257 terms.
ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 16, torch.float64: 16}


@pytest.fixture(autouse=True)
def full_fp32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def case_of(shape, length, dtype, **changes):
    heads, kv_heads, size = shape
    facts = {"dropout": 0.0, "documents": False, "deterministic": False} | changes
    return AttentionCase(length, B, heads, kv_heads, size, NAMES[dtype], **facts)


def skip_unless_served(backend, case):
    reason = obstacle(backend, [case], torch.cuda.get_device_capability(CUDA))
    if reason is not None:
        pytest.skip(f"{backend} {reason}")


def starts_of(case):
    """Documents of one token, of odd lengths, and a sequence that is one."""
    return [np.array([1, 2, 66, 99]), np.array([], dtype=np.int64)] if case.documents else None


def fused_inputs(case):
    """Queries, keys and values as views of one tensor, a leaf that they get their values from."""
    generator = torch.Generator().manual_seed(case.heads * case.head_dim)
    heads = [case.heads, case.kv_heads, case.kv_heads]
    shape = (case.seq_length, B, sum(heads), case.head_dim)
    fused = torch.randn(shape, generator=generator).to(COMPUTE_DTYPES[case.dtype])
    return fused, heads


def run(attend, fused, heads, upstream, dropout, documents):
    """Output and the gradient of the fused tensor, float64 on the CPU."""
    fused = fused.requires_grad_()
    output = attend(*fused.split(heads, dim=2), dropout, documents)
    (gradient,) = torch.autograd.grad(output, fused, upstream.to(output))
    return [x.detach().double().cpu() for x in (output, gradient)]


def compare(backend, case):
    skip_unless_served(backend, case)
    fused, heads = fused_inputs(case)
    starts = starts_of(case)
    documents = None if starts is None else find_documents(starts, case.seq_length)
    count = case.seq_length * B * case.heads * case.head_dim
    # The same rounded numbers for all: what is compared is the work of one kernel.
    upstream = torch.linspace(-1.0, 1.0, count).to(torch.float16).to(torch.bfloat16)
    upstream = upstream.view(case.seq_length, B, -1)
    on_gpu = None if documents is None else documents.to(CUDA)
    attend = BACKENDS[backend].attend
    found = run(attend, fused.to(CUDA), heads, upstream.to(CUDA), 0.0, on_gpu)
    truth = run(BACKENDS["reference"].attend, fused.double(), heads, upstream, 0.0, documents)
    dtype = COMPUTE_DTYPES[case.dtype]
    error = ROUNDINGS[dtype] * torch.finfo(dtype).eps
    for one, expected in zip(found, truth, strict=True):
        assert (one - expected).norm() < error * expected.norm()
        assert (one - expected).abs().max() < 8 * error * expected.abs().max()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", sorted(ROUNDINGS, key=str))
def test_forward_and_gradients_of_views(backend, shape, length, dtype):
    compare(backend, case_of(shape, length, dtype))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_documents(backend, shape, dtype):
    compare(backend, case_of(shape, 257, dtype, documents=True))


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "flash_attn", "flash_attn_4"])
def test_one_head_and_one_sequence(backend):
    """Sizes of 1, whose strides say nothing of the order of dimensions."""
    case = case_of((1, 1, 64), 128, torch.bfloat16)
    skip_unless_served(backend, case)
    q, k, v = (torch.randn(128, 1, 1, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(3))
    found = BACKENDS[backend].attend(q, k, v, 0.0, None)
    truth = BACKENDS["reference"].attend(q.double(), k.double(), v.double(), 0.0, None)
    assert found.shape == truth.shape
    assert (found - truth).norm() < 4 * torch.finfo(torch.bfloat16).eps * truth.norm()


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_copied(backend, shape):
    """Neither the views that come in nor the output, whose heads the next product wants joined."""
    case = case_of(shape, 128, torch.bfloat16)
    skip_unless_served(backend, case)
    fused, heads = fused_inputs(case)
    views = fused.to(CUDA).split(heads, dim=2)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], record_shapes=True) as profile:
        output = BACKENDS[backend].attend(*views, 0.0, None)
    assert output.is_contiguous()
    copies = [
        event.input_shapes
        for event in profile.key_averages(group_by_input_shape=True)
        if event.key in ("aten::copy_", "aten::clone")
    ]
    # Not the two numbers of a random stream.
    assert [shapes for shapes in copies if math.prod(shapes[0]) >= views[1].numel()] == []


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "flash_attn", "fused_softmax"])
def test_dropout_keeps_the_mean_and_can_be_replayed(backend):
    case = case_of((4, 4, 64), 128, torch.bfloat16, dropout=0.5)
    skip_unless_served(backend, case)
    attend = BACKENDS[backend].attend
    q, k = (torch.randn(128, B, 4, 64, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    v = torch.ones_like(q)
    try:
        torch.manual_seed(3)
        first = attend(q, k, v, 0.5, None)
    except RuntimeError as error:
        if backend != "cudnn":  # whose releases 9.11 to 9.13 have no dropout
            raise
        pytest.skip(str(error))
    torch.manual_seed(3)
    assert torch.equal(first, attend(q, k, v, 0.5, None))
    assert not torch.equal(first, attend(q, k, v, 0.5, None))
    # Rows of weights that add up to 1 without dropout; 128 x 2 x 4 of them.
    assert abs(first.double().mean().item() - 1.0) < 0.1


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.125])
def test_the_measured_choice(documents, dropout, capsys):
    case = case_of((16, 4, 128), 2048, torch.bfloat16, documents=documents, dropout=dropout)
    state = torch.cuda.get_rng_state(CUDA)
    place = _place(CUDA)
    chosen = choose_attention(Wanted("auto", {case: 1.0}, layers=24), place)
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
    assert obstacle(chosen, [case], place.capability) is None
    told = capsys.readouterr().out
    assert told.startswith(f"attention: {chosen}, the fastest on {place.title}")
    say(told)  # for who reads the figures
    assert choose_attention(Wanted("auto", {case: 1.0}, 24, before=chosen), place) == chosen


def test_a_time_is_about_that_of_the_work():
    """Four times the heads take between two and eight times as long."""
    small, large = (case_of((heads, heads, 128), 4096, torch.bfloat16) for heads in (8, 32))
    taken = [time_on_gpu("sdpa", case, CUDA) for case in (small, large)]
    assert 2.0 < taken[1] / taken[0] < 8.0


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("documents", [False, True])
def test_what_serves_passes_the_check(backend, documents):
    case = case_of((16, 4, 128), 2048 + 64, torch.bfloat16, documents=documents)
    skip_unless_served(backend, case)
    check(backend, case, CUDA)


def test_memory_that_is_not_there_is_a_reason():
    huge = case_of((64, 64, 128), 65536, torch.bfloat16)
    found = measure(["fused_softmax"], {huge: 1.0}, lambda *of: time_on_gpu(*of, CUDA))
    assert found.failed == {"fused_softmax": "does not fit into the GPU's memory"}
