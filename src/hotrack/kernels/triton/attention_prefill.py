"""Causal attention of prompt chunks over the paged cache, themselves included (FlashAttention-2, Dao, 2023).

One program takes a tile of one sequence's queries, for one head. Tiles of keys are gathered page by page with
pointer arithmetic; those that no query of the tile sees are skipped, and only those at the edges of what is
seen are masked.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.paged import LayerKV
from hotrack.kernels.triton.device import Device, device_of

LOG2_E = math.log2(math.e)


@triton.jit
def _find(query_start, num_seqs, tile, base, TILE_M: tl.constexpr):
    """Whose ``tile`` it is; sequence s starts at tile (its first row) // TILE_M + s."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        starts = (tl.load(query_start + middle) - base) // TILE_M + middle
        low = tl.where(starts <= tile, middle, low)
        high = tl.where(starts <= tile, high, middle)
    return low


@triton.jit
def _keys(  # noqa: C901 - constants choose
    queries, best, total, value, query_position, first, last, length, oldest, k, v, table, scale,
    k_block_stride, k_token_stride, v_block_stride, v_token_stride,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK: tl.constexpr,
    TILE_N: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The keys from ``first`` to ``last``, multiples of TILE_N."""
    column_k, column_v = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
    for start in tl.range(first, last, TILE_N):
        position = start + tl.arange(0, TILE_N)
        inside = position < length
        if MASK:
            if WINDOW > 0:
                inside = inside & (position > oldest)  # older blocks may be others' by now
            block = tl.load(table + position // BLOCK, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK).to(tl.int64)
        offset = position % BLOCK
        k_at = k + (block * k_block_stride + offset * k_token_stride)[:, None] + column_k[None, :]
        v_at = v + (block * v_block_stride + offset * v_token_stride)[:, None] + column_v[None, :]
        if MASK:
            keys = tl.load(k_at, mask=inside[:, None] & (column_k < D_K)[None, :], other=0.0)
        elif PAD_K == D_K:
            keys = tl.load(k_at)
        else:
            keys = tl.load(k_at, mask=(column_k < D_K)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if MASK:
            seen = inside[None, :] & (position[None, :] <= query_position[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        base = higher
        if MASK:
            base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen no key yet
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        if MASK:
            values = tl.load(v_at, mask=inside[:, None] & (column_v < D_V)[None, :], other=0.0)
        elif PAD_V == D_V:
            values = tl.load(v_at)
        else:
            values = tl.load(v_at, mask=(column_v < D_V)[None, :], other=0.0)
        value = tl.dot(weights.to(values.dtype), values, acc=value * shrink[:, None], input_precision="ieee")
        best = higher
    return best, total, value


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _attend(
    q, k, v, tables, query_start, seq_lens, sinks, out, num_seqs, scale,
    q_token_stride, q_head_stride, k_block_stride, k_head_stride, k_token_stride,
    v_block_stride, v_head_stride, v_token_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr,
    PAD_V: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)  # neighbours share keys
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest of a sequence first
    base = tl.load(query_start)
    sequence = _find(query_start, num_seqs, tile, base, TILE_M)
    start = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    row0 = (tile - ((start - base) // TILE_M + sequence)) * TILE_M
    if row0 < query_len:
        row = row0 + tl.arange(0, TILE_M)
        is_row = row < query_len
        cached = length - query_len
        query_position = cached + row
        column_k, column_v = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
        token = start.to(tl.int64) + row
        queries = tl.load(
            q + head * q_head_stride + token[:, None] * q_token_stride + column_k[None, :],
            mask=is_row[:, None] & (column_k < D_K)[None, :],
            other=0.0,
        )
        best = tl.full([TILE_M], -float("inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        value = tl.zeros([TILE_M, PAD_V], tl.float32)
        if SINKS:  # a key without a value
            best = tl.zeros([TILE_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            total += 1.0
        kv_head = head // GROUP
        k_head, v_head = k + kv_head * k_head_stride, v + kv_head * v_head_stride
        table = tables + sequence.to(tl.int64) * table_stride
        last_position = cached + tl.minimum(row0 + TILE_M, query_len) - 1
        end = last_position // TILE_N * TILE_N + TILE_N
        full_end = (cached + row0 + 1) // TILE_N * TILE_N  # below, every query sees every key
        begin = 0
        oldest = cached + row0 - WINDOW  # the first query's
        if WINDOW > 0:
            begin = tl.maximum(oldest + 1, 0) // TILE_N * TILE_N
            full_begin = tl.maximum(last_position - WINDOW + TILE_N, 0) // TILE_N * TILE_N
            full_begin = tl.minimum(full_begin, end)
            best, total, value = _keys(
                queries, best, total, value, query_position, begin, full_begin, length, oldest, k_head,
                v_head, table, scale, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
                D_K, D_V, PAD_K, PAD_V, BLOCK, TILE_N, WINDOW, True,
            )  # fmt: skip
            begin = full_begin
            full_end = tl.maximum(full_end, begin)
        best, total, value = _keys(
            queries, best, total, value, query_position, begin, full_end, length, oldest, k_head, v_head,
            table, scale, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            D_K, D_V, PAD_K, PAD_V, BLOCK, TILE_N, WINDOW, False,
        )  # fmt: skip
        best, total, value = _keys(
            queries, best, total, value, query_position, full_end, end, length, oldest, k_head, v_head,
            table, scale, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
            D_K, D_V, PAD_K, PAD_V, BLOCK, TILE_N, WINDOW, True,
        )  # fmt: skip
        result = value / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (token * HEADS + head)[:, None] * D_V + column_v[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & (column_v < D_V)[None, :],
        )


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """``tile_m`` queries by ``tile_n`` keys at a time; ``stages`` of the pipeline: block numbers are fetched
    before keys, so every two stages put one more tile of keys in flight."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int


_LARGE = {
    128: PrefillConfig(128, 64, 8, 5),
    256: PrefillConfig(128, 64, 8, 3),
}  # 160 KiB of shared memory, up
_SMALL = {128: PrefillConfig(64, 64, 4, 3), 256: PrefillConfig(64, 32, 4, 3)}  # 8.9 and 12.x: 99 KiB


def prefill_config(k_dim: int, v_dim: int, itemsize: int, device: Device) -> PrefillConfig:
    """By width and shared memory, then fewer stages and smaller tiles until the tiles fit."""
    wide = max(triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim))
    chosen = (_LARGE if device.shared_bytes >= 160 << 10 else _SMALL)[128 if wide <= 128 else 256]
    tile_m, tile_n, stages = chosen.tile_m, chosen.tile_n, chosen.stages
    keys = (triton.next_power_of_2(k_dim) + triton.next_power_of_2(v_dim)) * itemsize
    rows = triton.next_power_of_2(k_dim) * itemsize
    while tile_m * rows + (stages + 1) // 2 * tile_n * keys > device.shared_bytes - 4096:
        if stages > 3:
            stages -= 2
        elif tile_n > 16:
            tile_n //= 2
        elif tile_m > 16:
            tile_m //= 2
        else:
            break
    return PrefillConfig(tile_m, tile_n, 4 if tile_m < 128 else chosen.warps, stages)


def prefill_attention(
    q: Tensor,
    kv: LayerKV,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_tokens: int,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """q [T, H, k_dim] (last dim dense) -> [T, H, v_dim], into ``out`` (dense) if given.

    block_tables int32 [S, blocks]; query_start int32 [S+1]: rows of q of each sequence, from any row on;
    seq_lens int32 [S] including the new tokens. ``max_tokens`` >= query_start[S] - query_start[0] bounds the
    launch. Rows of no sequence are left as they are.
    window: a token sees the last ``window`` keys, its own included. sinks [H]: logit of a key without value.
    """
    heads, k_dim, v_dim = q.shape[1], kv.k.shape[3], kv.v.shape[3]
    config = config or prefill_config(k_dim, v_dim, q.element_size(), device_of(q))
    if out is None:
        out = torch.empty(len(q), heads, v_dim, dtype=q.dtype, device=q.device)
    if not len(seq_lens) or not max_tokens:
        return out
    _attend[(heads, max_tokens // config.tile_m + len(seq_lens))](
        q, kv.k, kv.v, block_tables, query_start, seq_lens, seq_lens if sinks is None else sinks, out,
        len(seq_lens), scale * LOG2_E, q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.v.stride()[:3],
        block_tables.stride(0),
        HEADS=heads, GROUP=heads // kv.k.shape[1], D_K=k_dim, D_V=v_dim,
        PAD_K=max(16, triton.next_power_of_2(k_dim)), PAD_V=max(16, triton.next_power_of_2(v_dim)),
        BLOCK=kv.block_size, TILE_M=config.tile_m, TILE_N=config.tile_n, WINDOW=window or 0,
        SINKS=sinks is not None, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
