"""Attention by the softmax kernel in place between two products, against the formula in float64."""

import numpy as np
import pytest

from lib.layers.attention import attention_backend
from lib.layers.documents import find_documents
from tests.kernels.closeness import assert_same_as_exact, drawn
from tests.layers.test_attention import by_formula

LENGTH = 5
WHOLE = np.array([], dtype=np.int64)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("starts", [[WHOLE, WHOLE], [np.array([1, 3]), WHOLE]])
def test_forward_and_gradients(heads, groups, starts, device, dtype):
    """Queries, keys and values are views; few programs, one for each query of each head."""
    sizes = [heads, groups, groups]
    fused = drawn((LENGTH, 2, sum(sizes), 8), dtype, device, seed=1)
    upstream = drawn((LENGTH, 2, heads * 8), dtype, device, seed=2)
    documents = find_documents(starts, LENGTH).to(device) if len(starts[0]) else None

    def by_kernel(fused):
        return attention_backend("fused_softmax")(*fused.split(sizes, dim=2), 0.0, documents)

    def by_hand(fused):
        return by_formula(*fused.split(sizes, dim=2), starts)

    assert_same_as_exact(by_kernel, by_hand, [fused], [upstream], dtype)
