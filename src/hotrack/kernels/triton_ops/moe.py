"""The elementwise parts of expert evaluation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024


@triton.jit
def _silu_and_mul(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As the reference: gate_up [M, 2 * I], gate first -> [M, I]; rounded once."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if rows:
        _silu_and_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@triton.jit
def _combine(y, place, weights, out, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(place + token * CHOICES + choice).to(tl.int64)
        weight = tl.load(weights + token * CHOICES + choice)
        total += weight * tl.load(y + row * width + column, mask=inside).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def combine(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """As ``cuda_ops.moe.weighted_sum``: y [T * k, D], place int64 [T * k], weights float32 [T, k] ->
    [T, D]."""
    tokens, choices = weights.shape
    width = y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if tokens:
        grid = (tokens, triton.cdiv(width, block))
        _combine[grid](y, place, weights.contiguous(), out, width, CHOICES=choices, BLOCK=block)
    return out
