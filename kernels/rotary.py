"""Rotary position embedding in place, and the cut of a fused projection into heads.

A head x of D entries at a position with cosines c and sines s, D/2 of each, becomes

    y_i         = x_i c_i         - x_{i + D/2} s_i
    y_{i + D/2} = x_{i + D/2} c_i + x_i s_i,           0 <= i < D/2

(Su et al., RoFormer; rotate-half form as in Megatron). The map is linear and orthogonal: its
gradient is turned back by the same angles, which takes neither x nor y. So y takes the memory of x,
and queries, keys and values stay where the product wrote them:

    forward   qkv [S, B, (N + 2G) D] = | N heads of q | G of k | G of v |, q and k turned in place
    backward  gradients of q, k, v in any strides, as attention hands them over,
              -> one gradient of qkv: turned back and joined in one pass

A program takes one position of one sequence, whose heads share their angles, and reads each head
whole before it writes it.

Shape legend: S sequence, B batch, N query heads, G key and value heads, D head dimension,
C = (N + 2G) D columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

# Of a program. A thread that moves 8 pairs at a time makes two accesses of 16 bytes in a 16-bit
# type, the widest there are.
_MAX_WARPS = 4
_PAIRS_PER_WARP = 8 * 32


@triton.jit
def _move_heads(
    x,  # where the heads of one position begin
    x_step,  # from one head to the next
    y,
    y_step,
    angles,  # fp32 cosines of the position, or None: heads are copied, not turned
    sines,  # from the cosines to the sines
    heads,
    half,  # D/2
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < half
    cos, sin = 1.0, 0.0
    if angles is not None:
        cos = tl.load(angles + pair, mask=inside)
        sin = tl.load(angles + sines + pair, mask=inside)
        if BACK:
            sin = -sin
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)[:, None]).to(tl.int64)
        mask = (head < heads) & inside
        source = x + head * x_step + pair
        target = y + head * y_step + pair
        first = tl.load(source, mask=mask)
        second = tl.load(source + half, mask=mask)
        if angles is not None:
            a = first.to(tl.float32)
            b = second.to(tl.float32)
            first = (a * cos - b * sin).to(y.dtype.element_ty)
            second = (b * cos + a * sin).to(y.dtype.element_ty)
        tl.store(target, first, mask=mask)
        tl.store(target + half, second, mask=mask)


@triton.jit
def _rotary_turn_heads(
    x,  # [S, B, N, D]
    x_strides,
    y,  # [S, B, N, D] out, or x itself
    y_strides,
    table,  # fp32 [2, S, B, D/2]
    table_strides,
    batch,
    heads,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    s = row // batch
    b = row % batch
    x += s * x_strides[0] + b * x_strides[1]
    y += s * y_strides[0] + b * y_strides[1]
    angles = table + s * table_strides[1] + b * table_strides[2]
    sines = table_strides[0]
    _move_heads(x, x_strides[2], y, y_strides[2], angles, sines, heads, half, BACK, HEADS, PAIRS)


@triton.jit
def _rotary_join_heads(
    q,  # [S, B, N, D]
    q_strides,
    k,  # [S, B, G, D]
    k_strides,
    v,  # [S, B, G, D]
    v_strides,
    qkv,  # [S, B, C] out
    angles,  # fp32 [2, S, B, D/2], or None
    table_strides,
    batch,
    heads,
    kv_heads,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    s = row // batch
    b = row % batch
    q += s * q_strides[0] + b * q_strides[1]
    k += s * k_strides[0] + b * k_strides[1]
    v += s * v_strides[0] + b * v_strides[1]
    size = 2 * half
    q_out = qkv + row * (heads + 2 * kv_heads) * size
    k_out = q_out + heads * size
    v_out = k_out + kv_heads * size
    sines = table_strides[0]
    if angles is not None:
        angles += s * table_strides[1] + b * table_strides[2]
    _move_heads(q, q_strides[2], q_out, size, angles, sines, heads, half, BACK, HEADS, PAIRS)
    _move_heads(k, k_strides[2], k_out, size, angles, sines, kv_heads, half, BACK, HEADS, PAIRS)
    _move_heads(v, v_strides[2], v_out, size, None, sines, kv_heads, half, BACK, HEADS, PAIRS)


def _power_of_two(number: int) -> int:
    """The least one that is not less."""
    return 1 << (number - 1).bit_length()


def _tile(heads: int, half: int) -> dict[str, int]:
    """How many heads, and pairs of each, a program moves at a time, and its warps."""
    pairs = _power_of_two(half)
    at_once = min(_power_of_two(heads), max(1, _MAX_WARPS * _PAIRS_PER_WARP // pairs))
    warps = min(_MAX_WARPS, max(1, at_once * pairs // _PAIRS_PER_WARP))
    return {"HEADS": at_once, "PAIRS": pairs, "num_warps": warps}


def _table_strides(table: Tensor, x_SBND: Tensor) -> tuple[int, ...]:
    """Strides of a table that fits ``x``; 0 along the batch where sequences share it."""
    assert table.dtype == torch.float32
    assert table.stride(-1) == 1
    length, batch, _, size = x_SBND.shape
    by_sequence = table if table.ndim == 4 else table.unsqueeze(2)
    return by_sequence.expand(2, length, batch, size // 2).stride()


def _rows_of_heads(x_SBND: Tensor) -> Tensor:
    """``x``, copied if the entries of a head do not lie side by side."""
    return x_SBND if x_SBND.stride(-1) == 1 else x_SBND.contiguous()


def _turn(x_SBND: Tensor, y_SBND: Tensor, table: Tensor, *, back: bool) -> None:
    """Writes ``x``, turned, to ``y``, which may be ``x``."""
    length, batch, heads, size = x_SBND.shape
    launch: Any = _rotary_turn_heads[(length * batch,)]
    launch(
        x_SBND,
        x_SBND.stride(),
        y_SBND,
        y_SBND.stride(),
        table,
        _table_strides(table, x_SBND),
        batch,
        heads,
        size // 2,
        BACK=back,
        **_tile(heads, size // 2),
    )


def _join(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, table: Tensor | None) -> Tensor:
    """Queries and keys, turned back if there is a table, and values as one [S, B, C]."""
    q, k, v = (_rows_of_heads(x) for x in (q_SBND, k_SBGD, v_SBGD))
    (length, batch, heads, size), kv_heads = q.shape, k.shape[2]
    qkv_SBC = q.new_empty(length, batch, (heads + 2 * kv_heads) * size)
    launch: Any = _rotary_join_heads[(length * batch,)]
    launch(
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        qkv_SBC,
        table,
        (0, 0, 0) if table is None else _table_strides(table, q),
        batch,
        heads,
        kv_heads,
        size // 2,
        BACK=True,
        **_tile(max(heads, kv_heads), size // 2),
    )
    return qkv_SBC


def _heads_of(qkv_SBC: Tensor, first: int, count: int, head_dim: int) -> Tensor:
    """Some heads as a tensor of its own in the same memory.

    No view, as autograd sees it: gradients of views would be padded and added up, part by part.
    """
    length, batch, columns = qkv_SBC.shape
    offset = qkv_SBC.storage_offset() + first * head_dim
    strides = (batch * columns, columns, head_dim, 1)
    storage = qkv_SBC.untyped_storage()
    return qkv_SBC.new_empty(0).set_(storage, offset, (length, batch, count, head_dim), strides)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        qkv_SBC: Tensor,
        table: Tensor | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert qkv_SBC.is_contiguous()
        assert qkv_SBC.shape[-1] == (heads + 2 * kv_heads) * head_dim
        ctx.save_for_backward(table)
        if table is not None:
            turned = _heads_of(qkv_SBC, 0, heads + kv_heads, head_dim)
            _turn(turned, turned, table, back=False)
            increment_version(qkv_SBC)  # autograd then refuses a producer that saved its output
        return (
            _heads_of(qkv_SBC, 0, heads, head_dim),
            _heads_of(qkv_SBC, heads, kv_heads, head_dim),
            _heads_of(qkv_SBC, heads + kv_heads, kv_heads, head_dim),
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        (table,), (q_SBND, k_SBGD, v_SBGD) = ctx.saved_tensors, grads
        return _join(q_SBND, k_SBGD, v_SBGD, table), None, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        x_SBND: Tensor,
        table: Tensor,
    ) -> Tensor:
        assert x_SBND.stride(-1) == 1
        ctx.save_for_backward(table)
        _turn(x_SBND, x_SBND, table, back=False)
        increment_version(x_SBND)
        storage, offset = x_SBND.untyped_storage(), x_SBND.storage_offset()
        return x_SBND.new_empty(0).set_(storage, offset, x_SBND.shape, x_SBND.stride())

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        grad_SBND = _rows_of_heads(grads[0])
        turned_SBND = grad_SBND.new_empty(grad_SBND.shape)
        _turn(grad_SBND, turned_SBND, table, back=True)
        return turned_SBND, None


def split_heads(
    qkv_SBC: Tensor, table: Tensor | None, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the memory of ``qkv``, queries and keys turned in place.

    Whoever made ``qkv`` must not need its values in backward.

    Args:
        qkv_SBC: fp32, bf16 or fp16, contiguous: the heads of q, then of k, then of v.
        table: cosines and sines, fp32 [2, S, D/2], or [2, S, B, D/2] if sequences differ; None
            turns nothing.
        heads: N.
        kv_heads: G.
        head_dim: D, even.

    Returns:
        q [S, B, N, D], k and v [S, B, G, D], rows of heads within the rows of ``qkv``.
    """
    return _SplitHeads.apply(qkv_SBC, table, heads, kv_heads, head_dim)


def rotate(x_SBND: Tensor, table: Tensor) -> Tensor:
    """Queries or keys alone, turned in place; the gradient is a new tensor.

    Whoever made ``x`` must not need its values in backward.

    Args:
        x_SBND: fp32, bf16 or fp16, in any strides that leave each head contiguous.
        table: as in ``split_heads``.

    Returns:
        [S, B, N, D] in the memory of ``x``.
    """
    return _Rotate.apply(x_SBND, table)
