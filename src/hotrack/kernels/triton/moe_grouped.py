"""Experts: each hit expert's weights are streamed once, and outputs are summed in a fixed order.

Two ways, by how many choices share an expert's weights:

    one or two tokens    a choice is one pass over its expert's rows on the ordinary cores; the second kernel
                         walks a token's experts itself, so the sum needs no further launch
    more                 blocks of choices of one expert (``moe_routing.sort_choices``) on the tensor cores,
                         16 choices each where few share an expert, up to 128 in a long prompt; then a sum

Every kernel takes sizes and grids from shapes alone, so a captured graph replays for any routing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.triton.device import Device, dependent, device_of, enter
from hotrack.kernels.triton.moe_routing import SortedChoices, sort_choices

DIRECT_TOKENS = 2  # beyond, tokens begin to share experts
SCALE_BLOCK = 128  # rows and columns of a weight that share a scale
Scales = tuple[Tensor, Tensor]
_RESERVED = 2 << 10  # shared memory that Triton keeps for itself
# (block_n, block_k, num_warps) of gate and up, and of down, the first that fits; measured on an H200.
_Shapes = Sequence[tuple[int, int, int]]
_TILES_FEW: tuple[_Shapes, _Shapes] = [(32, 128, 4)], [(128, 128, 4), (64, 128, 4)]
_TILES_64: tuple[_Shapes, _Shapes] = [(128, 64, 4), (64, 64, 4)], [(128, 64, 8), (64, 64, 4)]
_TILES_128: tuple[_Shapes, _Shapes] = (
    [(128, 64, 8), (64, 64, 8)],
    [(256, 64, 8), (128, 64, 8), (64, 64, 8)],
)
_GROUP = 8  # blocks of choices that pass over the same weights together, while those are in the cache


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of a product: ``block_n`` output channels, ``block_k`` summed at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


@triton.jit
def _gate_up_direct(
    x, weight, scale, ids, table, out, weight_stride, D: tl.constexpr, I: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE: tl.constexpr, TABLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    choice = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # x is read once per row, from the cache: spreading one copy over the threads would put a barrier
    # between the weights of one step and those of the next.
    row = x + (choice // K).to(tl.int64) * D + tl.zeros([BLOCK_N, 1], tl.int32)
    slot = tl.load(ids + choice).to(tl.int64)
    if TABLE:
        slot = tl.load(table + slot).to(tl.int64)
    at = weight + slot * weight_stride + channel[:, None] * D
    scale_at = scale
    if SCALE:
        scale_at += (slot * 2 * I // SCALE + tl.program_id(0) * BLOCK_N // SCALE) * (D // SCALE)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in tl.static_range(0, D, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        inside = (channel < I)[:, None] & (k < D)
        g = tl.load(at + k, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        u = tl.load(at + I * D + k, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        a = tl.load(row + k, mask=inside, other=0.0).to(tl.float32)
        if SCALE:
            gate += a * g * tl.load(scale_at + first // SCALE)
            up += a * u * tl.load(scale_at + I // SCALE * (D // SCALE) + first // SCALE)
        else:
            gate += a * g
            up += a * u
    g, u = tl.sum(gate, 1), tl.sum(up, 1)
    hidden = (g * tl.sigmoid(g) * u).to(out.dtype.element_ty)
    tl.store(out + choice.to(tl.int64) * I + channel, hidden, mask=channel < I)


@triton.jit
def _down_direct(
    hidden, weight, scale, ids, table, weights, residual, out, weight_stride, D: tl.constexpr,
    I: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE: tl.constexpr, RESIDUAL: tl.constexpr, TABLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, BLOCK_N * K2)  # every choice of every channel
    choice = line % K2
    channel = tl.program_id(0) * BLOCK_N + line // K2
    used = (choice < K) & (channel < D)
    slot = tl.load(ids + token * K + choice, mask=used, other=0).to(tl.int64)
    if TABLE:
        slot = tl.load(table + slot, mask=used, other=0).to(tl.int64)
    at = weight + (slot * weight_stride + channel * I)[:, None]
    row = hidden + ((token * K + choice) * I)[:, None]
    scale_at = scale
    if SCALE:
        scale_at += ((slot * (D // SCALE) + channel // SCALE) * (I // SCALE))[:, None]
    total = tl.zeros([BLOCK_N * K2, BLOCK_K], tl.float32)
    lane = tl.arange(0, BLOCK_K)[None, :]
    w = tl.load(at + lane, mask=used[:, None] & (lane < I), other=0.0, eviction_policy="evict_first")
    enter(PDL)  # the choices were made before the kernel that wrote ``hidden``
    for first in tl.static_range(0, I, BLOCK_K):
        k = first + lane
        inside = used[:, None] & (k < I)
        if first > 0:
            w = tl.load(at + k, mask=inside, other=0.0, eviction_policy="evict_first")
        a = tl.load(row + k, mask=inside, other=0.0).to(tl.float32)
        if SCALE:
            scaled = a * tl.load(scale_at + first // SCALE, mask=used[:, None], other=0.0)
            total += w.to(tl.float32) * scaled
        else:
            total += w.to(tl.float32) * a
    share = tl.load(weights + token * K + choice, mask=used, other=0.0)
    value = tl.sum(tl.reshape(tl.sum(total, 1) * share, [BLOCK_N, K2]), 1)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if RESIDUAL:
        value += tl.load(residual + token * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + channel, value.to(out.dtype.element_ty), mask=channel < D)


@triton.jit
def _block_and_tile(num_blocks, tiles, GROUP: tl.constexpr):
    """This program's (block of choices, tile of channels): GROUP blocks run over all tiles together."""
    program = tl.program_id(0)
    group = program // (GROUP * tiles)
    height = tl.minimum(num_blocks - group * GROUP, GROUP)
    inner = program % (GROUP * tiles)
    return group * GROUP + inner % height, inner // height


@triton.jit(do_not_specialize=["num_choices"])
def _gate_up_blocks(
    x, weight, scale, order, block_expert, num_blocks, out, num_choices, weight_stride, D, I, tiles,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    blocks = tl.load(num_blocks)
    if tl.program_id(0) >= blocks * tiles:
        return
    block, tile = _block_and_tile(blocks, tiles, GROUP)
    choice = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(block_expert + block).to(tl.int64)
    channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    is_row, is_channel = (choice < num_choices)[:, None], (channel < I)[None, :]
    a_at = x + (choice // K).to(tl.int64)[:, None] * D + lane[None, :]
    w_at = weight + expert * weight_stride + channel[None, :] * D + lane[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, D, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_at + first, mask=is_row, other=0.0)
            g = tl.load(w_at + first, mask=is_channel, other=0.0)
            u = tl.load(w_at + I * D + first, mask=is_channel, other=0.0)
        else:
            inside = first + lane < D
            a = tl.load(a_at + first, mask=is_row & inside[None, :], other=0.0)
            g = tl.load(w_at + first, mask=is_channel & inside[:, None], other=0.0)
            u = tl.load(w_at + I * D + first, mask=is_channel & inside[:, None], other=0.0)
        if SCALE:
            at = scale + (expert * (2 * I // SCALE) + tile * BLOCK_N // SCALE) * (D // SCALE) + first // SCALE
            gate += tl.dot(a, g.to(a.dtype), input_precision="ieee") * tl.load(at)
            up += tl.dot(a, u.to(a.dtype), input_precision="ieee") * tl.load(at + I // SCALE * (D // SCALE))
        else:
            gate = tl.dot(a, g, gate, input_precision="ieee")
            up = tl.dot(a, u, up, input_precision="ieee")
    hidden = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + choice.to(tl.int64)[:, None] * I + channel[None, :], hidden, mask=is_row & is_channel)


@triton.jit(do_not_specialize=["num_choices"])
def _down_blocks(
    hidden, weight, scale, order, block_expert, num_blocks, out, num_choices, weight_stride, D, I, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    blocks = tl.load(num_blocks)
    if tl.program_id(0) >= blocks * tiles:
        return
    block, tile = _block_and_tile(blocks, tiles, GROUP)
    choice = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(block_expert + block).to(tl.int64)
    channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    is_row, is_channel = (choice < num_choices)[:, None], (channel < D)[None, :]
    a_at = hidden + choice.to(tl.int64)[:, None] * I + lane[None, :]
    w_at = weight + expert * weight_stride + channel[None, :] * I + lane[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, I, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_at + first, mask=is_row, other=0.0)
            w = tl.load(w_at + first, mask=is_channel, other=0.0)
        else:
            inside = first + lane < I
            a = tl.load(a_at + first, mask=is_row & inside[None, :], other=0.0)
            w = tl.load(w_at + first, mask=is_channel & inside[:, None], other=0.0)
        if SCALE:
            at = scale + (expert * (D // SCALE) + tile * BLOCK_N // SCALE) * (I // SCALE) + first // SCALE
            total += tl.dot(a, w.to(a.dtype), input_precision="ieee") * tl.load(at)
        else:
            total = tl.dot(a, w, total, input_precision="ieee")
    place = out + choice.to(tl.int64)[:, None] * D + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row & is_channel)


@triton.jit
def _combine(
    y, weights, residual, out, D, K: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        row = token * K + choice
        total += tl.load(weights + row) * tl.load(y + row * D + channel, mask=inside, other=0.0).to(
            tl.float32
        )
    if RESIDUAL:
        total += tl.load(residual + token * D + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * D + channel, total.to(out.dtype.element_ty), mask=inside)


def choose_block_m(choices: int, num_experts: int) -> int:
    """Rows of a block: what the mean expert gets, with room for its spread."""
    mean = choices / num_experts
    if mean <= 6:
        return 16
    if mean <= 20:
        return 32
    return 64 if mean <= 64 else 128


def choose_tiles(block_m: int, itemsize: int, device: Device, scaled: bool = False) -> tuple[Tile, Tile]:
    """(gate and up, down): as many stages in flight as shared memory takes. ``itemsize``: of the inputs."""
    few = block_m <= 32
    wanted = _TILES_FEW if few else _TILES_64 if block_m == 64 else _TILES_128
    choices = list(wanted)
    if scaled:  # a tile has one scale
        choices = [[(min(n, SCALE_BLOCK), SCALE_BLOCK, warps) for n, _, warps in some] for some in wanted]
    # Short tiles leave half of the memory to a second program on the same multiprocessor.
    budget = (device.shared_bytes - _RESERVED) // (2 if few else 1)
    first, second = (
        _fitting(some, block_m, parts, itemsize, budget, 4 if few else 3)
        for some, parts in zip(choices, (2, 1), strict=True)
    )
    return first, second


def _fitting(shapes: _Shapes, rows: int, parts: int, itemsize: int, budget: int, stages: int) -> Tile:
    """The first of the (block_n, block_k, num_warps) of which two stages are within ``budget`` bytes, else
    the last. ``parts``: weights beside each other."""

    def stage_bytes(shape: tuple[int, int, int]) -> int:
        return (rows + shape[0] * parts) * shape[1] * itemsize

    shape = next((shape for shape in shapes if 2 * stage_bytes(shape) <= budget), shapes[-1])
    return Tile(*shape, max(2, min(stages, budget // stage_bytes(shape))))


def choose_direct_tiles(D: int, I: int, scaled: bool = False) -> tuple[Tile, Tile]:
    """(gate and up, down) of one or two tokens: 16 bytes a thread and load, hundreds of programs."""
    if scaled:
        return Tile(16, SCALE_BLOCK, 4), Tile(4, SCALE_BLOCK, 4)
    return Tile(4, _divisor(D, 512), 8), Tile(4, _divisor(I, 256), 2)


def _divisor(width: int, limit: int) -> int:
    """The largest power of two up to ``limit`` that divides ``width``, if it is wide enough to load well;
    else one that covers it, or ``limit``."""
    block = min(width & -width, limit)
    return block if block >= 128 else min(limit, triton.next_power_of_2(width))


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slots: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    scales: Scales | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """As ``reference.moe.moe_experts``, plus ``residual`` [T, D] if there is one.

    x [T, D] contiguous, gate_up [slots, 2 * I, D], down [slots, D, I] (experts contiguous), slots int32
    or int64 [T, k], weights float32 [T, k] -> [T, D]. Products and sums in float32; the hidden vectors, and
    the outputs of each choice, are rounded to x's dtype. No host synchronisation.

    ``scales``: of float8_e4m3fn weights, float32 [slots, 2 * I / 128, D / 128] and [slots, D / 128, I / 128]
    with D and I multiples of 128; the inputs stay as they are. Needs capability 8.9.
    ``table``: slot of each expert, where ``slots`` has experts.
    """
    if len(x) <= DIRECT_TOKENS:
        return experts_direct(x, gate_up, down, slots, weights, residual, scales, table=table)
    block_m = choose_block_m(slots.numel(), len(gate_up))
    choices = sort_choices(slots, len(gate_up), block_m, table)
    tiles = choose_tiles(block_m, x.element_size(), device_of(x), scales is not None)
    y = experts_blocks(x, gate_up, down, choices, slots.shape[1], tiles, scales)
    return combine(y, weights, residual)


def experts_direct(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slots: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    scales: Scales | None = None,
    tiles: tuple[Tile, Tile] | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """:func:`moe_experts` without sorting: the weights are read once per choice. Two launches."""
    (T, D), k, I = x.shape, slots.shape[1], down.shape[2]
    hidden = torch.empty(T * k, I, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    if T == 0:
        return out
    first, second = tiles or choose_direct_tiles(D, I, scales is not None)
    scale, block = scales or (gate_up, down), 0 if scales is None else SCALE_BLOCK
    slots, weights = slots.contiguous(), weights.contiguous()
    chosen, extra = (slots, slots if table is None else table), {"TABLE": table is not None} | dependent(x)
    _gate_up_direct[(triton.cdiv(I, first.block_n), T * k)](
        x, gate_up, scale[0], *chosen, hidden, gate_up.stride(0), D=D, I=I, K=k, BLOCK_N=first.block_n,
        BLOCK_K=first.block_k, SCALE=block, num_warps=first.num_warps, **extra,
    )  # fmt: skip
    _down_direct[(triton.cdiv(D, second.block_n), T)](
        hidden, down, scale[1], *chosen, weights, x if residual is None else residual, out, down.stride(0),
        D=D, I=I, K=k,
        K2=triton.next_power_of_2(k), BLOCK_N=second.block_n, BLOCK_K=second.block_k,
        SCALE=block, RESIDUAL=residual is not None, num_warps=second.num_warps, **extra,
    )  # fmt: skip
    return out


def experts_blocks(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    choices: SortedChoices,
    k: int,
    tiles: tuple[Tile, Tile],
    scales: Scales | None = None,
) -> Tensor:
    """x [T, D] -> [T * k, D]: the output of every choice, in the order of ``slots``, without its weight."""
    (T, D), I = x.shape, down.shape[2]
    n, block_m = T * k, choices.block_m
    hidden = torch.empty(n, I, dtype=x.dtype, device=x.device)
    y = torch.empty(n, D, dtype=x.dtype, device=x.device)
    if n == 0:
        return y
    first, second = tiles
    scale, block = scales or (gate_up, down), 0 if scales is None else SCALE_BLOCK
    columns = triton.cdiv(I, first.block_n)
    _gate_up_blocks[(choices.max_blocks * columns,)](
        x, gate_up, scale[0], choices.order, choices.block_expert, choices.num_blocks, hidden, n,
        gate_up.stride(0), D,
        I, columns, K=k, BLOCK_M=block_m, BLOCK_N=first.block_n, BLOCK_K=first.block_k,
        EVEN_K=D % first.block_k == 0, GROUP=_GROUP, SCALE=block, num_warps=first.num_warps,
        num_stages=first.num_stages, **dependent(x),
    )  # fmt: skip
    columns = triton.cdiv(D, second.block_n)
    _down_blocks[(choices.max_blocks * columns,)](
        hidden, down, scale[1], choices.order, choices.block_expert, choices.num_blocks, y, n,
        down.stride(0), D, I,
        columns, BLOCK_M=block_m, BLOCK_N=second.block_n, BLOCK_K=second.block_k,
        EVEN_K=I % second.block_k == 0, GROUP=_GROUP, SCALE=block, num_warps=second.num_warps,
        num_stages=second.num_stages, **dependent(x),
    )  # fmt: skip
    return y


def combine(y: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """y [T * k, D], weights float32 [T, k] -> [T, D]: each token's weighted sum, in the order of its choices,
    plus ``residual``."""
    (T, k), D = weights.shape, y.shape[1]
    out = torch.empty(T, D, dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(D))
    if T:
        _combine[(T, triton.cdiv(D, block))](
            y, weights.contiguous(), y if residual is None else residual, out, D, K=k, BLOCK=block,
            RESIDUAL=residual is not None, **dependent(y),
        )  # fmt: skip
    return out
