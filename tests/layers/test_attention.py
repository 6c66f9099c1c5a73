"""Core attention: every backend against the plain formula; causality; grouped heads; dropout.

Each also over documents that do not see each other: the formula is then applied to each alone.
Those of a GPU are looked at from outside here, and run in tests/gpu.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lib.layers import attention_backends
from lib.layers.attention import BACKENDS, attention_backend, backend_name
from lib.layers.documents import find_documents
from tests.reference import FLOAT64, plain_attention

ON_CPU = ["fused_softmax", "reference", "sdpa"]
_HEADS = [(4, 4), (4, 2), (6, 1)]
# Of two sequences of 9: one document of one token at either end; a sequence that is one document.
STARTS = [np.array([1, 4, 8]), np.array([], dtype=np.int64)]
ONE = [np.array([], dtype=np.int64)] * 2


def drawn(heads, groups, length=9, dtype=torch.float64):
    q = torch.randn(length, 2, heads, 8, dtype=dtype)
    k = torch.randn(length, 2, groups, 8, dtype=dtype)
    v = torch.randn(length, 2, groups, 8, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)]


def by_formula(q, k, v, starts):
    """Sequence by sequence, document by document, head by head; [S, B, N * D]."""
    shared = q.shape[2] // k.shape[2]
    rows = []
    for row, its_starts in enumerate(starts):
        pieces = []
        for first, end in pairwise([0, *its_starts.tolist(), len(q)]):
            heads = [
                plain_attention(
                    q[None, first:end, row, head],
                    k[None, first:end, row, head // shared],
                    v[None, first:end, row, head // shared],
                )
                for head in range(q.shape[2])
            ]
            pieces.append(torch.cat(heads, dim=-1)[0])
        rows.append(torch.cat(pieces))
    return torch.stack(rows, dim=1)


def several(starts, length=9):
    """The documents, or None if each sequence is one."""
    return find_documents(starts, length) if any(map(len, starts)) else None


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize(("heads", "groups"), _HEADS)
@pytest.mark.parametrize(("length", "starts"), [(1, ONE), (9, ONE), (9, STARTS)])
def test_forward_and_gradients(backend, heads, groups, length, starts):
    inputs = drawn(heads, groups, length)
    upstream = torch.randn(length, 2, heads * 8, dtype=torch.float64)
    output = attention_backend(backend)(*inputs, 0.0, several(starts, length))
    expected = by_formula(*inputs, starts)
    torch.testing.assert_close(output, expected, **FLOAT64)
    found = torch.autograd.grad((output * upstream).sum(), inputs)
    truth = torch.autograd.grad((expected * upstream).sum(), inputs)
    for gradient, true_gradient in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient, true_gradient, **FLOAT64)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("starts", [ONE, STARTS])
def test_low_precision(backend, dtype, starts):
    inputs = [x.detach().to(dtype) for x in drawn(4, 2, length=32)]
    output = attention_backend(backend)(*inputs, 0.0, several(starts, 32))
    assert output.dtype == dtype
    expected = by_formula(*(x.double() for x in inputs), starts)
    # Scores, weights and the result are rounded; their sizes are about 3.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("starts", [ONE, STARTS])
def test_a_token_changes_itself_and_what_follows_in_its_document(backend, starts):
    """B20: nothing before it, and nothing beyond the document's end."""
    q, k, v = (x.detach() for x in drawn(4, 2))
    core, documents = attention_backend(backend), several(starts)
    base = core(q, k, v, 0.0, documents)
    for place in range(9):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[place] += 1.0
        output = core(*changed, 0.0, documents)
        for row, its_starts in enumerate(starts):
            end = min((start for start in its_starts.tolist() if start > place), default=9)
            same = output[:, row].eq(base[:, row]).all(-1).tolist()
            assert same == [not place <= other < end for other in range(9)]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("starts", [ONE, [np.array([1]), np.array([2])]])
def test_dropout_keeps_the_mean_and_can_be_replayed(backend, starts):
    q, k, v = (x.detach().float() for x in drawn(2, 2, length=4))
    core, documents = attention_backend(backend), several(starts, 4)
    torch.manual_seed(3)
    first = core(q, k, v, 0.5, documents)
    torch.manual_seed(3)
    assert torch.equal(first, core(q, k, v, 0.5, documents))
    assert not torch.equal(first, core(q, k, v, 0.5, documents))
    wide = [x.repeat(1, 3000, 1, 1) for x in (q, k, v)]  # 6000 sequences, two different ones
    mean = core(*wide, 0.5, several(starts * 3000, 4)).unflatten(1, (3000, 2)).mean(1)
    # A mean of 3000 values of size about 2.
    torch.testing.assert_close(mean, core(q, k, v, 0.0, documents), rtol=0, atol=5 * 2 / 3000**0.5)


def fused_views(heads, groups, length=9, dtype=torch.float64):
    """Queries, keys and values as parts of one tensor, which is a leaf."""
    fused = torch.randn(length, 2, heads + 2 * groups, 8, dtype=dtype, requires_grad=True)
    return fused, fused.split([heads, groups, groups], dim=2)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize(("heads", "groups"), _HEADS)
@pytest.mark.parametrize("starts", [ONE, STARTS])
def test_views_of_one_tensor(backend, heads, groups, starts):
    fused, views = fused_views(heads, groups)
    upstream = torch.randn(9, 2, heads * 8, dtype=torch.float64)
    output = attention_backend(backend)(*views, 0.0, several(starts))
    expected = by_formula(*views, starts)
    torch.testing.assert_close(output, expected, **FLOAT64)
    (found,) = torch.autograd.grad((output * upstream).sum(), fused)
    (truth,) = torch.autograd.grad((expected * upstream).sum(), fused)
    torch.testing.assert_close(found, truth, **FLOAT64)


def kernels_allowed():
    """Of torch's attention kernels, those that a call may take."""
    cuda = torch.backends.cuda
    flags = {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return {name for name, allowed in flags.items() if allowed}


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "sdpa"])
def test_torch_is_given_views_and_told_the_kernel(backend, monkeypatch):
    """The kernel's output has its query's order of dimensions, as torch's have: no copy of it."""
    _, (q, k, v) = fused_views(4, 4)
    before, calls = kernels_allowed(), []

    def kernel(query, key, value, **options):
        for given, mine in zip((query, key, value), (q, k, v), strict=True):
            assert given.data_ptr() == mine.data_ptr()
            assert given.stride() == mine.permute(1, 2, 0, 3).stride()
        out = torch.randn(9, 2, 4, 8, dtype=torch.float64)
        calls.append((kernels_allowed(), options, out))
        return out.permute(1, 2, 0, 3)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    output = attention_backend(backend)(q, k, v, 0.25)
    ((allowed, options, out),) = calls
    assert allowed == ({backend} if backend != "sdpa" else before)
    assert kernels_allowed() == before
    assert options == {
        "attn_mask": None,
        "dropout_p": 0.25,
        "is_causal": True,
        "enable_gqa": False,
    }
    assert output.data_ptr() == out.data_ptr()
    assert output.shape == (9, 2, 32)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
def test_efficient_attention_repeats_shared_heads(heads, monkeypatch):
    """Its kernel knows none; the plain one stands in for it here."""
    real = torch.nn.functional.scaled_dot_product_attention

    def kernel(query, key, value, **options):
        assert key.shape == value.shape == query.shape
        assert not options["enable_gqa"]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return real(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    for starts in (ONE, STARTS):
        inputs = drawn(*heads)
        output = attention_backend("efficient")(*inputs, 0.0, several(starts))
        torch.testing.assert_close(output, by_formula(*inputs, starts), **FLOAT64)


def document_kernel(calls):
    """A plain loop in the place of flash attention over documents."""

    def kernel(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        calls.append(cu_seqlens_q.diff().tolist())
        borders = list(pairwise(cu_seqlens_q.tolist()))
        one = [by_formula(*(x[a:b, None] for x in (q, k, v)), ONE[:1]) for a, b in borders]
        return torch.cat(one)[:, 0].unflatten(-1, q.shape[1:])

    return kernel


@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_flash_attention_is_given_documents_one_after_another(backend, monkeypatch):
    """What a GPU does, with a plain loop in place of the kernel."""
    inputs, calls = drawn(4, 2), []
    monkeypatch.setattr(attention_backends, "_torch_flash", lambda: document_kernel(calls))
    monkeypatch.setattr(attention_backends, "_has_flash_kernel", lambda q, dropout: dropout == 0.0)
    output = attention_backend(backend)(*inputs, 0.0, several(STARTS))
    torch.testing.assert_close(output, by_formula(*inputs, STARTS), **FLOAT64)
    assert calls == [[1, 3, 4, 1, 9]]
    if backend == "sdpa":
        attention_backend(backend)(*inputs, 0.0)  # without a border nothing of this is asked
        attention_backend(backend)(*inputs, 0.5, several(STARTS))  # nor where it cannot serve
        assert len(calls) == 1


def test_torchs_flash_attention_is_causal_and_shares_heads(monkeypatch):
    """The arguments of the release that is installed, and of one that shares heads unasked."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    seen = []

    def asks(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
        seen.append((cu_q, cu_k, max_q, max_k, window_size, enable_gqa))
        return query

    def unasked(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size):
        seen.append((cu_q, cu_k, max_q, max_k, window_size, None))
        return query

    cuts = {"cu_seqlens_q": 1, "cu_seqlens_k": 2, "max_seqlen_q": 3, "max_seqlen_k": 4}
    for function in (asks, unasked):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        attention_backends._torch_flash.cache_clear()
        assert attention_backends._torch_flash()("q", "k", "v", **cuts) == "q"
    attention_backends._torch_flash.cache_clear()
    assert seen == [(1, 2, 3, 4, (-1, 0), True), (1, 2, 3, 4, (-1, 0), None)]


def test_what_a_backend_cannot_serve_it_refuses():
    inputs, documents = drawn(4, 2), several(STARTS)
    with pytest.raises(AssertionError):
        attention_backend("cudnn")(*inputs, 0.0, documents)
    with pytest.raises(AssertionError):
        attention_backend("flash")(*inputs, 0.5, documents)
    with pytest.raises(AssertionError):
        attention_backend("flash_attn_4")(*inputs, 0.5)


def test_auto_stands_for_torchs_own_pick_and_others_are_refused():
    assert backend_name("auto") == backend_name("sdpa") == "sdpa"
    assert attention_backend("auto") is BACKENDS["sdpa"].attend
    with pytest.raises(KeyError):
        attention_backend("flash4")
