"""Attention of single queries over the paged cache, split over the keys (Flash-Decoding, Dao et al., 2023).

The query heads of a K/V head are the rows of one product, so every key and value is read once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.paged import HeadShape

TILE = 64  # keys at a time
MIN_ROWS = 16  # of a product on tensor cores
PROGRAMS = 264  # two per multiprocessor of the largest parts
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["splits", "split_tiles"])
def _attend(
    q, vectors, tables, seq_lens, out, partial, extremes, scale,
    q_token_stride, q_head_stride, table_stride, block_vectors, splits, split_tiles,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = kv_head * GROUP + row
    is_row = (row < GROUP)[:, None]
    queries = tl.load(
        q + sequence * q_token_stride + head[:, None] * q_head_stride + column[None, :],
        mask=is_row,
        other=0.0,
    )
    length = tl.load(seq_lens + sequence)
    first = split * split_tiles * TILE
    last = tl.minimum(length, first + split_tiles * TILE)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    value = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < last
        block = tl.load(tables + sequence * table_stride + position // BLOCK, mask=seen, other=0).to(tl.int64)
        key = block * block_vectors + kv_head * BLOCK + position % BLOCK  # which vector
        at = key[:, None] * DIM + column[None, :]
        keys = tl.load(vectors + at, mask=seen[:, None], other=0.0)
        values = tl.load(vectors + at + KV_HEADS * BLOCK * DIM, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        value = value * shrink[:, None]
        value += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    if SPLIT:
        index = (sequence * KV_HEADS * GROUP + head) * splits + split
        tl.store(partial + index[:, None] * DIM + column[None, :], value, mask=is_row)
        tl.store(extremes + index * 2, best, mask=row < GROUP)
        tl.store(extremes + index * 2 + 1, total, mask=row < GROUP)
    else:
        place = out + (sequence * KV_HEADS * GROUP + head[:, None]) * DIM + column[None, :]
        tl.store(place, (value / total[:, None]).to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["splits"])
def _merge(partial, extremes, out, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM)
    there = split < splits
    best = tl.load(extremes + (row * splits + split) * 2, mask=there, other=-float("inf"))
    total = tl.load(extremes + (row * splits + split) * 2 + 1, mask=there, other=0.0)
    weight = tl.exp2(best - tl.max(best, 0))  # 0 for a part without keys
    values = tl.load(
        partial + (row * splits + split[:, None]) * DIM + column[None, :], mask=there[:, None], other=0.0
    )
    result = tl.sum(values * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row * DIM + column, result.to(out.dtype.element_ty))


def can_decode(heads: HeadShape, block_size: int) -> bool:
    """Triton's ranges are powers of two, and its products at least 16 wide."""
    dim = heads.head_dim
    return dim >= 16 and dim & (dim - 1) == 0 and block_size <= TILE


def decode_attention(
    q: Tensor,
    vectors: Tensor,
    tables: Tensor,
    seq_lens: Tensor,
    longest: int,
    block_vectors: int,
    block_size: int,
    heads: HeadShape,
    scale: float,
) -> Tensor:
    """q [B, num_heads, d] (rows may be apart), vectors [N, d] of one layer's cache, tables int32 [B, blocks],
    seq_lens int32 [B], none above ``longest`` -> [B, num_heads, d].

    ``block_vectors``: vectors from one block of the layer to its next. As ``cuda_ops.attention`` over queries
    of one token.
    """
    batch, dim = len(q), heads.head_dim
    tiles = triton.cdiv(longest, TILE)
    wanted = triton.cdiv(PROGRAMS, batch * heads.num_kv_heads)
    split_tiles = triton.cdiv(tiles, max(1, min(wanted, MAX_SPLITS, tiles)))
    splits = triton.cdiv(tiles, split_tiles)
    out = torch.empty(batch, heads.num_heads, dim, dtype=q.dtype, device=q.device)
    parts = batch * heads.num_heads * splits if splits > 1 else 0
    partial = torch.empty(parts, dim, dtype=torch.float32, device=q.device)
    extremes = torch.empty(parts, 2, dtype=torch.float32, device=q.device)
    _attend[(batch, heads.num_kv_heads, splits)](
        q, vectors, tables, seq_lens, out, partial, extremes, scale * math.log2(math.e),
        q.stride(0), q.stride(1), tables.stride(0), block_vectors, splits, split_tiles,
        GROUP=heads.group_size, ROWS=max(MIN_ROWS, triton.next_power_of_2(heads.group_size)), DIM=dim,
        KV_HEADS=heads.num_kv_heads, BLOCK=block_size, TILE=TILE, SPLIT=splits > 1, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _merge[(batch * heads.num_heads,)](
            partial, extremes, out, splits, DIM=dim, SPLITS=triton.next_power_of_2(splits), num_warps=4
        )
    return out
