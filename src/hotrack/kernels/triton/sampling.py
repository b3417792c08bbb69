"""From logits to one token and its log-probability per row, in two launches and without the host.

The meaning is that of ``engine.sampler``: thresholds keep every token tied with the last one kept, and one
uniform number, a function of (seed, position) alone, is looked up in the cumulative weights in token order.
The number comes from the same SplitMix64 stream (Steele, Lea, Flood, 2014), computed here. A row is the work
of one program, in one order: its place in the batch, and the rest of the batch, have no part in it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INVALID_TOKEN = -1
_PART = 8192  # logits per program of the first pass
_BLOCK = 4096  # logits at a time in the second


@triton.jit
def _scan(logits, highest, first, mass, V, stride, parts, PART: tl.constexpr):
    """Of each part of each row: the maximum, where it is, and the sum of exp(logit - maximum)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + token, mask=token < V, other=-float("inf"))
    x = tl.where(x != x, float("inf"), x)  # NaN makes the row invalid, as infinity does
    best = tl.max(x, 0)
    shift = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    tl.store(highest + row * parts + part, best)
    tl.store(first + row * parts + part, tl.min(tl.where(x == best, token, V), 0))
    tl.store(mass + row * parts + part, tl.sum(tl.exp(x - shift), 0))


@triton.jit
def _key(x):
    """int32 in the order of the float32 x; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1): see ``engine.sampling_batch.uniforms``."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    start = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    bits = _mix(start + (position.to(tl.uint64, bitcast=True) + 1) * golden)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _amounts(row, V, a, b, c, floor, best, temperature, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """For each of three keys: the weight, then the number, of the tokens at or above it and the floor. COUNT:
    the number stands for the weight."""
    nothing, none = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    mass_a, mass_b, mass_c = nothing, nothing, nothing
    many_a, many_b, many_c = none, none, none
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=-float("inf"))
        key = _key(x)
        kept = (token < V) & (key >= floor)
        many_a = many_a + (kept & (key >= a)).to(tl.int32)
        many_b = many_b + (kept & (key >= b)).to(tl.int32)
        many_c = many_c + (kept & (key >= c)).to(tl.int32)
        if not COUNT:
            weight = tl.where(kept, tl.exp((x - best) / temperature), 0.0)
            mass_a = mass_a + tl.where(key >= a, weight, 0.0)
            mass_b = mass_b + tl.where(key >= b, weight, 0.0)
            mass_c = mass_c + tl.where(key >= c, weight, 0.0)
    count_a, count_b, count_c = tl.sum(many_a, 0), tl.sum(many_b, 0), tl.sum(many_c, 0)
    if COUNT:
        return (
            count_a.to(tl.float32), count_b.to(tl.float32), count_c.to(tl.float32), count_a, count_b, count_c
        )  # fmt: skip
    return tl.sum(mass_a, 0), tl.sum(mass_b, 0), tl.sum(mass_c, 0), count_a, count_b, count_c


@triton.jit
def _threshold(row, V, low, high, floor, target, best, temperature, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """A key that keeps the same tokens as the largest one with at least ``target`` at or above it does.
    ``low`` is one that has that much, ``high`` the largest there is. Two bits of the key per pass, until a
    single token lies between the bounds."""
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    many_low, many_high = V + tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while (high - low > 1) & (many_low - many_high > 1):
        step = (high - low) // 4
        b = low + (high - low) // 2
        a, c = tl.maximum(b - step, low), tl.minimum(b + step, high)
        mass_a, mass_b, mass_c, many_a, many_b, many_c = _amounts(
            row, V, a.to(tl.int32), b.to(tl.int32), tl.minimum(c, 2147483647).to(tl.int32), floor, best,
            temperature, COUNT, BLOCK,
        )  # fmt: skip
        is_a, is_b, is_c = (a == low) | (mass_a >= target), mass_b >= target, (c < high) & (mass_c >= target)
        upper = tl.where(is_c | (c == high), many_high, many_c)
        many_high = tl.where(is_b, upper, tl.where(is_a, many_b, many_a))
        high = tl.where(is_b, tl.where(is_c, high, c), tl.where(is_a, b, a))
        lower = tl.where(is_a & (a > low), many_a, many_low)
        many_low = tl.where(is_c, many_c, tl.where(is_b, many_b, lower))
        low = tl.where(is_c, c, tl.where(is_b, b, tl.where(is_a, a, low)))
    return low.to(tl.int32)


@triton.jit
def _draw(row, V, key, best, temperature, uniform, BLOCK: tl.constexpr):
    """The token in whose share of the weight, in token order, the uniform number falls."""
    total = tl.zeros([], tl.float64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=-float("inf"))
        weight = tl.where((token < V) & (_key(x) >= key), tl.exp((x - best) / temperature), 0.0)
        total += tl.sum(weight.to(tl.float64), 0)
    target = uniform * total
    before, last = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    passed = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < V, other=-float("inf"))
        kept = (token < V) & (_key(x) >= key)
        weight = tl.where(kept, tl.exp((x - best) / temperature), 0.0).to(tl.float64)
        end = before + tl.cumsum(weight, 0)
        passed += ((token < V) & (end <= target)).to(tl.int32)
        before += tl.sum(weight, 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
    return tl.minimum(tl.sum(passed, 0), last)  # rounding may put the target at the very end


@triton.jit
def _choose(
    logits, highest, first, mass, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, logprobs, V,
    stride, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    part = tl.arange(0, PARTS)
    there = part < parts
    bests = tl.load(highest + index * parts + part, mask=there, other=-float("inf"))
    best = tl.max(bests, 0)
    valid = (best > -float("inf")) & (best < float("inf"))
    best = tl.where(valid, best, 0.0)
    share = tl.load(mass + index * parts + part, mask=there, other=0.0)
    finite = tl.abs(bests) < float("inf")
    total = tl.sum(tl.where(finite, share, 0.0) * tl.exp(tl.where(finite, bests - best, 0.0)), 0)
    arg = tl.load(first + index * parts + part, mask=there, other=V)
    token = tl.min(tl.where(bests == best, arg, V), 0)
    temperature = tl.load(temperatures + index)
    if (temperature > 0.0) & valid:
        top_k, top_p, min_p = tl.load(top_ks + index), tl.load(top_ps + index), tl.load(min_ps + index)
        top = _key(best)
        lowest = _key(tl.full([], -float("inf"), tl.float32))
        key = lowest
        if min_p > 0.0:
            key = _key(best + temperature * tl.log(min_p))
        if (top_k > 0) & (top_k < V):
            target = top_k.to(tl.float32)
            kth = _threshold(row, V, lowest, top, lowest, target, best, temperature, True, BLOCK)
            key = tl.maximum(key, kth)
        if top_p < 1.0:
            kept, _, _, _, _, _ = _amounts(row, V, key, top, top, key, best, temperature, False, BLOCK)
            target = top_p * kept
            edge = _threshold(row, V, key, top, key, target, best, temperature, False, BLOCK)
            key = tl.maximum(key, edge)
        uniform = _uniform(tl.load(seeds + index), tl.load(positions + index))
        token = _draw(row, V, key, best, temperature, uniform, BLOCK)
    chosen = tl.load(row + token, mask=valid, other=0.0)
    tl.store(tokens + index, tl.where(valid, token, -1))
    tl.store(
        logprobs + index, tl.where(valid, chosen - best - tl.log(tl.where(valid, total, 1.0)), float("nan"))
    )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One entry per row: ``temperature`` float32 (0: the most likely token), ``top_k`` int32 (0: all),
    ``top_p`` float32 (1: all), ``min_p`` float32 (0: all), ``seed`` and ``position`` int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """logits float32 [R, V] (rows may be apart), after bias and penalties -> tokens int32 [R] and the
    log-probability of each under ``logits``, float32 [R].

    ``INVALID_TOKEN`` and NaN where a row holds NaN or +inf, or nothing but -inf.
    """
    R, V = logits.shape
    device, parts = logits.device, triton.cdiv(V, _PART)
    tokens = torch.empty(R, dtype=torch.int32, device=device)
    logprobs = torch.empty(R, dtype=torch.float32, device=device)
    highest = torch.empty(R, parts, dtype=torch.float32, device=device)
    mass = torch.empty(R, parts, dtype=torch.float32, device=device)
    first = torch.empty(R, parts, dtype=torch.int32, device=device)
    if R == 0:
        return tokens, logprobs
    _scan[(R, parts)](logits, highest, first, mass, V, logits.stride(0), parts, PART=_PART, num_warps=8)
    _choose[(R,)](
        logits, highest, first, mass, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed,
        rows.position, tokens, logprobs, V, logits.stride(0), parts,
        PARTS=max(2, triton.next_power_of_2(parts)), BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return tokens, logprobs
