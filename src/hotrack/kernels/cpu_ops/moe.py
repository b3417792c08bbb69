"""Expert evaluation on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.reference.linear import silu_and_mul

# Up to this many bytes of gathered expert weights, one batched product beats a loop over experts.
GATHER_BYTES = 2 << 20


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """As the reference. A few rows gather their experts; more rows are sorted by expert."""
    per_expert = (gate_up[0].numel() + down[0].numel()) * x.element_size()
    evaluate = _gathered if slots.numel() * per_expert <= GATHER_BYTES else _sorted
    y = evaluate(x, gate_up, down, slots)  # [T, k, D]
    return torch.bmm(weights.unsqueeze(1), y.float()).squeeze(1).to(x.dtype)


def _gathered(x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor) -> Tensor:
    """One matrix-vector product per (token, choice) -> [T, k, D]"""
    T, k = slots.shape
    flat = slots.flatten()
    rows = x[:, None, :].expand(T, k, -1).reshape(T * k, 1, -1)
    hidden = silu_and_mul(torch.bmm(rows, gate_up.index_select(0, flat).transpose(1, 2)))
    return torch.bmm(hidden, down.index_select(0, flat).transpose(1, 2)).view(T, k, -1)


def _sorted(x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor) -> Tensor:
    """Rows of one expert are neighbours, so each expert is two matrix products -> [T, k, D]"""
    T, k = slots.shape
    order = slots.flatten().argsort(stable=True)
    counts = torch.bincount(slots.flatten(), minlength=len(gate_up)).tolist()
    rows = torch.split(x.index_select(0, order // k), counts)
    used = [e for e, count in enumerate(counts) if count]
    hidden = silu_and_mul(torch.cat([F.linear(rows[e], gate_up[e]) for e in used]))
    parts = torch.split(hidden, [counts[e] for e in used])
    results = torch.cat([F.linear(h, down[e]) for e, h in zip(used, parts, strict=True)])
    return torch.empty_like(results).index_copy_(0, order, results).view(T, k, -1)
