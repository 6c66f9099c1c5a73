"""Core attention: every backend against the plain formula; causality; grouped heads; dropout.

Each also over documents that do not see each other: the formula is then applied to each alone.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lib.layers import attention
from lib.layers.attention import BACKENDS, attention_backend
from lib.layers.documents import find_documents
from tests.reference import FLOAT64, plain_attention

_HEADS = [(4, 4), (4, 2), (6, 1)]
# Of two sequences of 9: one document of one token at either end; a sequence that is one document.
_STARTS = [np.array([1, 4, 8]), np.array([], dtype=np.int64)]
_ONE = [np.array([], dtype=np.int64)] * 2


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


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize(("heads", "groups"), _HEADS)
@pytest.mark.parametrize(("length", "starts"), [(1, _ONE), (9, _ONE), (9, _STARTS)])
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


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("starts", [_ONE, _STARTS])
def test_low_precision(backend, dtype, starts):
    inputs = [x.detach().to(dtype) for x in drawn(4, 2, length=32)]
    output = attention_backend(backend)(*inputs, 0.0, several(starts, 32))
    assert output.dtype == dtype
    expected = by_formula(*(x.double() for x in inputs), starts)
    # Scores, weights and the result are rounded; their sizes are about 3.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("starts", [_ONE, _STARTS])
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


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("starts", [_ONE, [np.array([1]), np.array([2])]])
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


def test_flash_attention_is_given_documents_one_after_another(monkeypatch):
    """What a GPU does, with a plain loop in place of the kernel."""
    inputs = drawn(4, 2)
    calls = []

    def kernel(q, k, v, query_offsets, key_offsets, longest_query, longest_key):
        assert query_offsets is key_offsets
        assert longest_query == longest_key == query_offsets.diff().max()
        calls.append(query_offsets.diff().tolist())
        borders = list(pairwise(query_offsets.tolist()))
        one = [by_formula(*(x[a:b, None] for x in (q, k, v)), _ONE[:1]) for a, b in borders]
        return torch.cat(one)[:, 0].unflatten(-1, (4, 8))

    monkeypatch.setattr(attention, "_flash_attention", lambda: kernel)
    monkeypatch.setattr(attention, "_has_flash_kernel", lambda q, dropout: dropout == 0.0)
    output = attention.sdpa_attention(*inputs, 0.0, several(_STARTS))
    torch.testing.assert_close(output, by_formula(*inputs, _STARTS), **FLOAT64)
    assert calls == [[1, 3, 4, 1, 9]]
    attention.sdpa_attention(*inputs, 0.0)  # without a border nothing of this is asked
    assert len(calls) == 1


def test_auto_is_torchs_choice_and_others_are_refused():
    assert attention_backend("auto") is BACKENDS["sdpa"]
    with pytest.raises(KeyError):
        attention_backend("flash4")
