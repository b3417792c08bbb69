"""Mixture-of-experts routing and expert evaluation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.reference.linear import silu_and_mul


def softmax_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> expert ids int64 [T, k] and their weights float32 [T, k], softmax over all experts.

    ``renormalize`` makes the k weights of a token sum to one.
    """
    weights, ids = logits.float().softmax(-1).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's experts.

    x [T, D], gate_up [slots, 2 * I, D], down [slots, D, I]; slots int64 [T, k] index the two stacks, weights
    float32 [T, k] -> [T, D]. Sums in float32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in torch.unique(slots).tolist():
        token, choice = torch.where(slots == slot)
        y = F.linear(silu_and_mul(F.linear(x[token], gate_up[slot])), down[slot])
        out.index_add_(0, token, y.float() * weights[token, choice, None])
    return out.to(x.dtype)
