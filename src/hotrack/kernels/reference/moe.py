"""Mixture-of-experts routing and expert evaluation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.reference.linear import silu_and_mul

Routed = tuple[Tensor, Tensor]


def softmax_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> expert ids int64 [T, k] and their weights float32 [T, k], softmax over all experts.

    ``renormalize`` makes the k weights of a token sum to one.
    """
    weights, ids = logits.float().softmax(-1).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """How :func:`sigmoid_topk` chooses: ``top_k`` experts out of the best ``top_groups`` of ``num_groups``
    groups of neighbours; their weights are made to sum to one if ``renormalize``, then times ``scale``."""

    top_k: int
    num_groups: int
    top_groups: int
    renormalize: bool
    scale: float


def sigmoid_topk(x: Tensor, weight: Tensor, bias: Tensor, routing: SigmoidRouting) -> Routed:
    """Routing without an auxiliary loss (Wang et al., 2024; DeepSeek-AI, 2024): ``bias`` float32 [E] takes
    part in the choice, not in the weights. x [T, D], weight float32 [E, D] -> expert ids int64 [T, k] and
    their weights float32 [T, k]. Everything in float32.
    """
    scores = F.linear(x.float(), weight).sigmoid()  # [T, E]
    choice = scores + bias
    if routing.top_groups < routing.num_groups:
        groups = choice.view(len(x), routing.num_groups, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(routing.top_groups, -1).indices  # [T, top_groups]
        out = torch.ones(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, False)
        choice = groups.masked_fill(out[..., None], float("-inf")).flatten(1)
    ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * routing.scale


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
