"""Linear layers over few rows: the weight is streamed once, at the speed of memory.

One row, or a few with a weight that stays in the cache, go through the ordinary cores, whole channels per
program; two to sixteen through the tensor cores, one tile of channels per program. Neither needs a second
launch, so sums have one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.triton.device import dependent, device_of, enter
from hotrack.kernels.triton.moe_grouped import Tile

MAX_ROWS = 16
_PROGRAMS = 512  # of narrow layers: several per multiprocessor
_RESERVED = 2 << 10
_CACHED = 1 << 19  # elements of a weight that rows read one after the other
_WIDE = 1 << 16  # channels of a vocabulary's head


@triton.jit
def _one_row(
    x, weight, bias, residual, out, N, x_stride, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = weight + channel.to(tl.int64)[:, None] * K
    lane = tl.arange(0, BLOCK_K)[None, :]
    inside = (channel < N)[:, None] & (lane < K)
    w = tl.load(at + lane, mask=inside, other=0.0, eviction_policy=EVICTION)
    enter(PDL)
    token = tl.program_id(1).to(tl.int64)
    # Read per channel, from the cache: no barrier between loads.
    row = x + token * x_stride + tl.zeros([BLOCK_N, 1], tl.int32)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        inside = (channel < N)[:, None] & (first + lane < K)
        if first > 0:
            w = tl.load(at + first + lane, mask=inside, other=0.0, eviction_policy=EVICTION)
        a = tl.load(row + first + lane, mask=inside, other=0.0)
        total += w.to(tl.float32) * a.to(tl.float32)
    value = tl.sum(total, 1)
    residual += token * N
    out += token * N
    if BIAS:
        value += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + channel, mask=channel < N, other=0.0).to(tl.float32)
    tl.store(out + channel, value.to(out.dtype.element_ty), mask=channel < N)


@triton.jit(do_not_specialize=["M"])
def _few_rows(
    x, weight, bias, residual, out, M, N, x_stride, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    row, lane = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_channel = (row < M)[:, None], (channel < N)[None, :]
    a_at = x + row[:, None] * x_stride + lane[None, :]
    w_at = weight + channel.to(tl.int64)[None, :] * K + lane[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_at + first, mask=is_row, other=0.0)
            w = tl.load(w_at + first, mask=is_channel, other=0.0)
        else:
            inside = first + lane < K
            a = tl.load(a_at + first, mask=is_row & inside[None, :], other=0.0)
            w = tl.load(w_at + first, mask=is_channel & inside[:, None], other=0.0)
        total = tl.dot(a, w, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)[None, :]
    place, inside = row.to(tl.int64)[:, None] * N + channel[None, :], is_row & is_channel
    if RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def row_by_row(M: int, N: int, K: int) -> bool:
    """Whether every row reads the weight by itself: there is one, or the weight stays in the cache."""
    return M == 1 or N * K <= _CACHED


def wins(M: int, N: int, K: int) -> bool:
    """Whether :func:`linear` is at least as fast as cuBLAS (an H200, docs/log.md)."""
    return M <= MAX_ROWS and (row_by_row(M, N, K) or N >= _WIDE)


def choose_tile(M: int, N: int, K: int, itemsize: int, shared_bytes: int) -> Tile:
    """Narrow tiles where the layer is narrow, so that every multiprocessor has work."""
    if row_by_row(M, N, K):
        block_k = min(1024, K & -K)
        block_k = block_k if block_k >= 128 else min(1024, triton.next_power_of_2(K))
        return Tile(4 if N >= 4 * _PROGRAMS else 2, block_k, 8)
    block_n = 16 if N < 64 * _PROGRAMS // 4 else 64
    block_k = 256 if block_n == 16 else 128
    used = (16 + block_n) * block_k * itemsize
    return Tile(block_n, block_k, 4, max(2, min(5, (shared_bytes - _RESERVED) // 2 // used)))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``x @ weight.T + bias + residual``, summed in float32 and rounded once.

    x [M, K] with M up to ``MAX_ROWS`` (rows may be apart), weight [N, K] contiguous, bias [N], residual
    [M, N] contiguous -> [M, N] of ``dtype`` (default: x's). More rows are cuBLAS's business.
    """
    (M, K), N = x.shape, len(weight)
    assert M <= MAX_ROWS, f"{M=}"
    out = torch.empty(M, N, dtype=dtype or x.dtype, device=x.device)
    if M == 0:
        return out
    tile = tile or choose_tile(M, N, K, x.element_size(), device_of(x).shared_bytes)
    grid = (triton.cdiv(N, tile.block_n),)
    extra = (out if bias is None else bias, out if residual is None else residual)
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "num_warps": tile.num_warps}
    flags |= dependent(x)
    if row_by_row(M, N, K):
        _one_row[(*grid, M)](
            x, weight, *extra, out, N, x.stride(0), K=K, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            EVICTION="evict_first" if M == 1 else "", **flags,
        )  # fmt: skip
    else:
        _few_rows[grid](
            x, weight, *extra, out, M, N, x.stride(0), K=K, BLOCK_M=MAX_ROWS, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, num_stages=tile.num_stages, **flags,
        )  # fmt: skip
    return out
