"""Experts on a GPU: rows sorted by expert, two grouped products, a weighted sum in a fixed order."""

import torch
from torch import Tensor

from hotrack.kernels.reference import moe as reference
from hotrack.kernels.reference.linear import silu_and_mul

ALIGN = 16  # bytes: what a row of a grouped product must be a multiple of
COMBINE_TOKENS = 1024  # tokens whose expert outputs are in float32 at a time


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """As the reference, which also evaluates what the grouped product does not take."""
    if not can_group(gate_up, down):
        return reference.moe_experts(x, gate_up, down, slots, weights)
    k = slots.shape[1]
    order, ends = sort_by_expert(slots, len(gate_up))
    rows = x.index_select(0, order // k)
    hidden = silu_and_mul(grouped_linear(rows, gate_up, ends))
    y = grouped_linear(hidden, down, ends)
    return weighted_sum(y, inverse_of(order), weights)


def can_group(gate_up: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped product takes these stacks."""
    widths = (gate_up.shape[2], down.shape[2])
    return gate_up.dtype == torch.bfloat16 and all(2 * width % ALIGN == 0 for width in widths)


def sort_by_expert(slots: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """slots int64 [T, k] -> the order of its flat entries by expert, int64 [T * k], equal ones in token
    order; and where each expert's entries end in that order, int32 [num_experts]."""
    found, order = slots.flatten().sort(stable=True)
    experts = torch.arange(1, num_experts + 1, device=slots.device)
    return order, torch.searchsorted(found, experts, out_int32=True)


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, K] sorted by expert, weight [E, N, K] -> [M, N]: rows ``ends[e - 1] .. ends[e]`` times
    ``weight[e].T``."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)


def weighted_sum(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """y [T * k, D], weights float32 [T, k]; entry (t, i) of ``weights`` is for row ``place[t * k + i]`` of y
    -> [T, D]. Sums in float32, in the order of the choices: no atomics, so equal input gives equal bits."""
    T, k = weights.shape
    out = torch.empty(T, y.shape[1], dtype=y.dtype, device=y.device)
    for start in range(0, T, COMBINE_TOKENS):
        stop = min(start + COMBINE_TOKENS, T)
        rows = y.index_select(0, place[start * k : stop * k]).view(stop - start, k, -1)
        out[start:stop] = torch.bmm(weights[start:stop, None], rows.float()).squeeze(1)
    return out
