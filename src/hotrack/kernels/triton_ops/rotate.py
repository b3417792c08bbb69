"""RMSNorm of q and k heads, rotary embedding and the write to the cache, in one pass over qkv."""

import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.paged import HeadShape

HEADS_AT_ONCE = 8


@triton.jit
def _rotate_and_cache(
    qkv, cos, sin, q_weight, k_weight, vectors, new_vectors, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = (head < H + 2 * K)[:, None]
    is_query = (head < H)[:, None]
    is_value = (head >= H + K)[:, None]
    here = qkv + token * (H + 2 * K) * 2 * HALF + head[:, None] * 2 * HALF + column[None, :]
    low = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(here + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = low, high
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        weight = tl.where(is_query, tl.load(q_weight + column)[None, :], tl.load(k_weight + column)[None, :])
        first = low * scale * weight.to(tl.float32)
        q_high, k_high = tl.load(q_weight + HALF + column), tl.load(k_weight + HALF + column)
        weight = tl.where(is_query, q_high[None, :], k_high[None, :])
        second = high * scale * weight.to(tl.float32)
    angle = token * 2 * HALF + column
    cos_low, cos_high = tl.load(cos + angle).to(tl.float32), tl.load(cos + angle + HALF).to(tl.float32)
    sin_low, sin_high = tl.load(sin + angle).to(tl.float32), tl.load(sin + angle + HALF).to(tl.float32)
    # The first half of ``sin`` is negated already.
    turned_low = first * cos_low[None, :] + second * sin_low[None, :]
    turned_high = second * cos_high[None, :] + first * sin_high[None, :]
    new_low = tl.where(is_value, low, turned_low).to(qkv.dtype.element_ty)
    new_high = tl.where(is_value, high, turned_high).to(qkv.dtype.element_ty)
    tl.store(here, new_low, mask=is_query)
    tl.store(here + HALF, new_high, mask=is_query)
    is_cached = (head >= H) & (head < H + 2 * K)
    vector = tl.load(new_vectors + token * 2 * K + head - H, mask=is_cached, other=0).to(tl.int64)
    there = vectors + vector[:, None] * 2 * HALF + column[None, :]
    tl.store(there, new_low, mask=is_cached[:, None])
    tl.store(there + HALF, new_high, mask=is_cached[:, None])


def can_rotate(heads: HeadShape) -> bool:
    """Triton's ranges are powers of two."""
    return heads.head_dim >= 4 and heads.head_dim & (heads.head_dim - 1) == 0


def rotate_and_cache(
    qkv: Tensor,
    heads: HeadShape,
    cos: Tensor,
    sin: Tensor,
    vectors: Tensor,
    new_vectors: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Norms (weights of q's and k's RMSNorm [d], or None) and rotates q in place; puts normed and rotated K,
    and V, into ``vectors`` [N, d] at ``new_vectors`` int64 [T * 2K].

    qkv [T, (H + 2K) * d] contiguous; cos, sin [T, 1, d]. What is left of k and v in qkv is undefined.
    """
    H, K = heads.num_heads, heads.num_kv_heads
    tokens = len(qkv)
    q_weight, k_weight = norms or (qkv, qkv)
    if tokens:
        grid = (tokens, triton.cdiv(H + 2 * K, HEADS_AT_ONCE))
        _rotate_and_cache[grid](
            qkv, cos, sin, q_weight, k_weight, vectors, new_vectors, eps,
            H=H, K=K, HALF=heads.head_dim // 2, NORM=norms is not None, ROWS=HEADS_AT_ONCE, num_warps=4,
        )  # fmt: skip
