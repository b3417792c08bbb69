"""RMSNorm of q and k heads, rotary embedding and the write to the paged cache, in one pass over qkv."""

import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.paged import HeadShape, LayerKV
from hotrack.kernels.triton.device import dependent, enter

HEADS_AT_ONCE = 8


@triton.jit
def _load_pair(at, low_column, rest_column, heads, HALF: tl.constexpr, REST: tl.constexpr):
    """The halves that are rotated into each other, and the rest of each head, in float32."""
    in_half = heads[:, None] & (low_column < HALF)[None, :]
    low = tl.load(at + low_column[None, :], mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(at + HALF + low_column[None, :], mask=in_half, other=0.0).to(tl.float32)
    rest = tl.load(
        at + 2 * HALF + rest_column[None, :], mask=heads[:, None] & (rest_column < REST)[None, :], other=0.0
    )
    return low, high, rest.to(tl.float32)


@triton.jit
def _store_pair(at, low, high, rest, low_column, rest_column, heads, HALF: tl.constexpr, REST: tl.constexpr):
    kind = at.dtype.element_ty
    in_half = heads[:, None] & (low_column < HALF)[None, :]
    tl.store(at + low_column[None, :], low.to(kind), mask=in_half)
    tl.store(at + HALF + low_column[None, :], high.to(kind), mask=in_half)
    if REST > 0:
        in_rest = heads[:, None] & (rest_column < REST)[None, :]
        tl.store(at + 2 * HALF + rest_column[None, :], rest.to(kind), mask=in_rest)


@triton.jit
def _weights(q_weight, k_weight, column, is_query, WIDTH: tl.constexpr):
    there = column < WIDTH
    of_q = tl.load(q_weight + column, mask=there, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + column, mask=there, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_q[None, :], of_k[None, :])


@triton.jit
def _rotate_and_cache(
    qkv, cos, sin, q_weight, k_weight, k, v, slots, eps, qkv_stride, angle_stride,
    k_block_stride, k_head_stride, k_token_stride, v_block_stride, v_head_stride, v_token_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, HALF: tl.constexpr,
    PAD_HALF: tl.constexpr, PAD_REST: tl.constexpr, PAD_V: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // BLOCK, slot % BLOCK
    here = qkv + token * qkv_stride
    if part < TURNS:
        REST: tl.constexpr = D - 2 * HALF
        head = part * ROWS + tl.arange(0, ROWS)
        low_column, rest_column = tl.arange(0, PAD_HALF), tl.arange(0, PAD_REST)
        is_query = head < H
        at = here + head[:, None] * D
        low, high, rest = _load_pair(at, low_column, rest_column, head < H + K, HALF, REST)
        if NORM:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
            factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
            low = low * factor * _weights(q_weight, k_weight, low_column, is_query, HALF)
            high = high * factor * _weights(q_weight + HALF, k_weight + HALF, low_column, is_query, HALF)
            rest = rest * factor * _weights(
                q_weight + 2 * HALF, k_weight + 2 * HALF, rest_column, is_query, REST
            )  # fmt: skip
        angle = token * angle_stride + low_column
        turns = low_column < HALF
        cos_low = tl.load(cos + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos + angle + HALF, mask=turns, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin + angle + HALF, mask=turns, other=0.0).to(tl.float32)[None, :]
        # The first half of ``sin`` is negated already.
        new_low = low * cos_low + high * sin_low
        new_high = high * cos_high + low * sin_high
        _store_pair(at, new_low, new_high, rest, low_column, rest_column, is_query, HALF, REST)
        is_key = (head >= H) & (head < H + K) & (slot >= 0)
        there = k + block * k_block_stride + (head - H)[:, None] * k_head_stride + offset * k_token_stride
        _store_pair(there, new_low, new_high, rest, low_column, rest_column, is_key, HALF, REST)
    else:
        head = (part - TURNS) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, PAD_V)
        mask = (head < K)[:, None] & (column < D_V)[None, :] & (slot >= 0)
        value = tl.load(here + (H + K) * D + head[:, None] * D_V + column[None, :], mask=mask)
        there = v + block * v_block_stride + head[:, None] * v_head_stride + offset * v_token_stride
        tl.store(there + column[None, :], value, mask=mask)


def rotate_and_cache(
    qkv: Tensor,
    heads: HeadShape,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """RMSNorm (``norms``: weights [d] of q's and k's, or None) and rotation of q in place; normed and rotated
    K, and V, into the cache at slot_mapping int64 [T]; a negative slot is skipped.

    qkv [T, H * d + K * d + K * v_dim], last dim dense. cos, sin [T, 1, r] of ``reference.rope``, dense; the
    first r <= d elements of a head are rotated. k and v inside qkv are left as they were.
    """
    H, K, d, v_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim, kv.v.shape[3]
    half = cos.shape[-1] // 2
    q_weight, k_weight = norms or (qkv, qkv)
    turns = triton.cdiv(H + K, HEADS_AT_ONCE)
    if len(qkv):
        _rotate_and_cache[(len(qkv), turns + triton.cdiv(K, HEADS_AT_ONCE))](
            qkv, cos, sin, q_weight, k_weight, kv.k, kv.v, slot_mapping, eps, qkv.stride(0), cos.shape[-1],
            *kv.k.stride()[:3], *kv.v.stride()[:3],
            H=H, K=K, D=d, D_V=v_dim, HALF=half, PAD_HALF=triton.next_power_of_2(half),
            PAD_REST=triton.next_power_of_2(max(1, d - 2 * half)), PAD_V=triton.next_power_of_2(v_dim),
            BLOCK=kv.block_size, NORM=norms is not None, ROWS=HEADS_AT_ONCE, TURNS=turns, num_warps=4,
            **dependent(qkv),
        )  # fmt: skip
