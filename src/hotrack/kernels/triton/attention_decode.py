"""Attention of a few new tokens per sequence over the paged cache, split over the keys (Flash-Decoding, Dao
et al., 2023).

All query heads of a K/V head, of all new tokens of a sequence, are the rows of one product: every key and
value is read once. How many parts a sequence is cut into is bounded on the host; how long each is, is decided
on the device from the sequence's length, so one captured graph serves every length.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.paged import LayerKV
from hotrack.kernels.triton.device import Device, dependent, device_of, enter

MIN_ROWS = 16  # of a product on tensor cores
MAX_SPLITS = 64
MAX_QUERY_LEN = 8  # new tokens per sequence; more are a prefill's work
LOG2_E = math.log2(math.e)


@triton.jit
def _part(length, splits, WINDOW: tl.constexpr, MAX_QUERY: tl.constexpr, TILE: tl.constexpr):
    """First key of a sequence that any new token sees, keys per part, and how many parts are not empty."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW - MAX_QUERY + 1, 0) // TILE * TILE
    tiles = (length - low + TILE - 1) // TILE
    part = tl.maximum((tiles + splits - 1) // splits, 1) * TILE
    return low, part, (length - low + part - 1) // part


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _attend(  # noqa: PLR0915 - one pass, in registers
    q, k, v, tables, query_start, seq_lens, sinks, out, partial, extremes, scale,
    q_token_stride, q_head_stride, k_block_stride, k_head_stride, k_token_stride,
    v_block_stride, v_head_stride, v_token_stride, table_stride, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, MAX_QUERY: tl.constexpr, ROWS: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    token = sequence
    query_len = 1
    if MAX_QUERY > 1:
        token = tl.load(query_start + sequence).to(tl.int64)
        query_len = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    low, part, parts = _part(length, splits, WINDOW, MAX_QUERY, TILE)
    row = tl.arange(0, ROWS)
    new = row // GROUP  # which new token of the sequence
    head = kv_head * GROUP + row % GROUP
    is_row = new < query_len
    column_k, column_v = tl.arange(0, PAD_K), tl.arange(0, PAD_V)
    if split < tl.maximum(parts, 1):
        first = low + split * part
        last = tl.minimum(length, first + part)
        queries = tl.load(
            q + (token + new)[:, None] * q_token_stride + head[:, None] * q_head_stride + column_k[None, :],
            mask=is_row[:, None] & (column_k < D_K)[None, :],
            other=0.0,
        )
        query_position = length - query_len + new
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        value = tl.zeros([ROWS, PAD_V], tl.float32)
        if SINKS:  # noqa: SIM102 - a constant; a key without a value, in the first part only
            if split == 0:
                best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
                total = tl.full([ROWS], 1.0, tl.float32)
        for start in tl.range(first, last, TILE):
            position = start + tl.arange(0, TILE)
            inside = position < last
            if WINDOW > 0:
                inside = inside & (
                    position > length - query_len - WINDOW
                )  # older blocks may be others' by now
            block = tl.load(tables + sequence * table_stride + position // BLOCK, mask=inside, other=0)
            block = block.to(tl.int64)
            offset = position % BLOCK
            k_at = block * k_block_stride + kv_head * k_head_stride + offset * k_token_stride
            v_at = block * v_block_stride + kv_head * v_head_stride + offset * v_token_stride
            keys = tl.load(
                k + k_at[:, None] + column_k[None, :],
                mask=inside[:, None] & (column_k < D_K)[None, :],
                other=0.0,
            )
            values = tl.load(
                v + v_at[:, None] + column_v[None, :],
                mask=inside[:, None] & (column_v < D_V)[None, :],
                other=0.0,
            )
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            seen = inside[None, :]
            if MAX_QUERY > 1:
                seen = seen & (position[None, :] <= query_position[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen no key yet
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(best - base)
            total = total * shrink + tl.sum(weights, 1)
            value = tl.dot(
                weights.to(values.dtype), values, acc=value * shrink[:, None], input_precision="ieee"
            )
            best = higher
        out_row = (token + new) * (KV_HEADS * GROUP) + head
        if SPLIT:
            index = ((sequence * MAX_QUERY + new) * (KV_HEADS * GROUP) + head) * splits + split
            tl.store(
                partial + index[:, None] * D_V + column_v[None, :],
                value,
                mask=is_row[:, None] & (column_v < D_V)[None, :],
            )
            tl.store(extremes + index * 2, best, mask=is_row)
            tl.store(extremes + index * 2 + 1, total, mask=is_row)
        else:
            result = value / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(
                out + out_row[:, None] * D_V + column_v[None, :],
                result.to(out.dtype.element_ty),
                mask=is_row[:, None] & (column_v < D_V)[None, :],
            )


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial, extremes, out, query_start, seq_lens, splits,
    HEADS: tl.constexpr, MAX_QUERY: tl.constexpr, D_V: tl.constexpr, PAD_V: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: its parts, in their order, into the output."""
    enter(PDL)
    head, new, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, _, parts = _part(tl.load(seq_lens + sequence), splits, WINDOW, MAX_QUERY, TILE)
    token = sequence
    query_len = 1
    if MAX_QUERY > 1:
        token = tl.load(query_start + sequence).to(tl.int64)
        query_len = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    if new < query_len:
        split, column = tl.arange(0, SPLITS), tl.arange(0, PAD_V)
        there = split < tl.maximum(parts, 1)
        index = ((sequence * MAX_QUERY + new) * HEADS + head) * splits + split
        best = tl.load(extremes + index * 2, mask=there, other=-float("inf"))
        total = tl.load(extremes + index * 2 + 1, mask=there, other=0.0)
        values = tl.load(
            partial + index[:, None] * D_V + column[None, :],
            mask=there[:, None] & (column < D_V)[None, :],
            other=0.0,
        )
        top = tl.max(best, 0)
        weight = tl.exp2(best - tl.where(top == -float("inf"), 0.0, top))
        total = tl.sum(total * weight, 0)
        result = tl.sum(values * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        place = (token + new) * HEADS + head
        tl.store(out + place * D_V + column, result.to(out.dtype.element_ty), mask=column < D_V)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``tile`` keys at a time. ``stages`` of the pipeline: block numbers are fetched before keys, so every
    two stages put one more tile in flight. ``programs_per_sm`` is what splitting aims for."""

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


def decode_config(k_dim: int, v_dim: int, itemsize: int, device: Device) -> DecodeConfig:
    """Safe on every device: takes stages, then halves the tile, until the tiles in flight fit in shared
    memory."""
    tile, stages = 64, 5
    width = (triton.next_power_of_2(k_dim) + triton.next_power_of_2(v_dim)) * itemsize
    room = device.shared_bytes * 7 // 8  # the rest: queries, weights, reductions
    while tile * width * (stages // 2) > room and stages > 3:
        stages -= 2
    while tile * width * (stages // 2) > room and tile > 16:
        tile //= 2
    return DecodeConfig(tile, 4, stages, 2)


def max_splits(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, config: DecodeConfig, device: Device
) -> int:
    """Parts per sequence that fill the device, none shorter than a tile if all sequences are ``max_seq_len``
    long."""
    wanted = triton.cdiv(config.programs_per_sm * device.multiprocessors, max(1, num_seqs * num_kv_heads))
    return max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_seq_len, config.tile)))


def can_decode(num_heads: int, num_kv_heads: int, max_query_len: int) -> bool:
    """Whether the rows of one K/V head fit in one product."""
    return max_query_len <= MAX_QUERY_LEN and num_heads // num_kv_heads * max_query_len <= 128


def decode_attention(
    q: Tensor,
    kv: LayerKV,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    *,
    query_start: Tensor | None = None,
    max_query_len: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
    splits: int | None = None,
) -> Tensor:
    """q [T, H, k_dim] (last dim dense) -> [T, H, v_dim], into ``out`` (dense) if given.

    block_tables int32 [S, blocks], seq_lens int32 [S] including the new tokens; none is above
    ``max_seq_len``, which bounds the launch only. A sequence of length 0 yields zeros.
    query_start int32 [S+1]: rows of q of each sequence, at most ``max_query_len`` of them; None: row i is
    sequence i's only token.
    window: a token sees the last ``window`` keys, its own included. sinks [H]: logit of a key without value.
    """
    device = device_of(q)
    num_seqs, kv_heads = len(seq_lens), kv.k.shape[1]
    heads, k_dim, v_dim = q.shape[1], kv.k.shape[3], kv.v.shape[3]
    config = config or decode_config(k_dim, v_dim, q.element_size(), device)
    splits = splits or max_splits(num_seqs, kv_heads, max_seq_len, config, device)
    if out is None:
        out = torch.empty(len(q), heads, v_dim, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    if query_start is None:
        max_query_len = 1
    parts = num_seqs * max_query_len * heads * splits if splits > 1 else 0
    partial = torch.empty(parts, v_dim, dtype=torch.float32, device=q.device)
    extremes = torch.empty(parts, 2, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    shared = {
        "MAX_QUERY": max_query_len, "D_V": v_dim, "PAD_V": max(16, triton.next_power_of_2(v_dim)),
        "TILE": config.tile, "WINDOW": window or 0, "num_warps": config.warps, **dependent(q),
    }  # fmt: skip
    _attend[(splits, kv_heads, num_seqs)](
        q, kv.k, kv.v, block_tables, seq_lens if query_start is None else query_start, seq_lens,
        seq_lens if sinks is None else sinks, out, partial, extremes, scale * LOG2_E,
        q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.v.stride()[:3],
        block_tables.stride(0), splits,
        GROUP=group, KV_HEADS=kv_heads,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group * max_query_len)), D_K=k_dim,
        PAD_K=max(16, triton.next_power_of_2(k_dim)), BLOCK=kv.block_size, SINKS=sinks is not None,
        SPLIT=splits > 1, num_stages=config.stages, **shared,
    )  # fmt: skip
    if splits > 1:
        _merge[(heads, max_query_len, num_seqs)](
            partial, extremes, out, seq_lens if query_start is None else query_start, seq_lens, splits,
            HEADS=heads, SPLITS=triton.next_power_of_2(splits), **shared,
        )  # fmt: skip
    return out
