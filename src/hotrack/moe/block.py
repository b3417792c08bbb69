"""The sparse feed-forward block: router, dispatcher, experts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hotrack.kernels.base import Kernel
from hotrack.kernels.reference.moe import SigmoidRouting
from hotrack.layers.base import Build, Layer
from hotrack.layers.linear import ReplicatedLinear
from hotrack.layers.mlp import GatedMLP
from hotrack.modelspec.spec import MoeSpec
from hotrack.moe.dispatcher import Dispatcher, LocalDispatcher
from hotrack.moe.experts import Experts


class SoftmaxRouter(Layer):
    """Top-k experts of a softmax over all of them; replicated on every rank so that all choose alike."""

    def __init__(self, hidden_size: int, moe: MoeSpec, build: Build) -> None:
        super().__init__(build)
        self.top_k, self.renormalize = moe.top_k, moe.norm_topk_prob
        self.weight = self.declare(moe.num_experts, hidden_size)

    def bind(self) -> None:
        self.kernel = self.ops.linear(self.weight.data)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> expert ids int64 [T, k], weights float32 [T, k]"""
        return self.ops.softmax_topk(self.kernel(x), self.top_k, self.renormalize)


class SigmoidRouter(Layer):
    """Top-k experts by a sigmoid of each, plus a bias that corrects the choice and not the weights;
    replicated, and in float32, so that all ranks choose alike."""

    def __init__(self, hidden_size: int, moe: MoeSpec, build: Build) -> None:
        super().__init__(build)
        self.routing = SigmoidRouting(
            moe.top_k, moe.num_groups, moe.top_groups, moe.norm_topk_prob, moe.routed_scaling
        )
        self.weight = self.declare(moe.num_experts, hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = self.declare(moe.num_experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> expert ids int64 [T, k], weights float32 [T, k]"""
        return self.ops.sigmoid_topk(x, self.weight.data, self.e_score_correction_bias.data, self.routing)


class SharedExpert(GatedMLP):
    """An expert for every token, weighted by a sigmoid of its own."""

    def __init__(self, hidden_size: int, intermediate_size: int, build: Build) -> None:
        super().__init__(hidden_size, intermediate_size, False, build)
        self.gate = ReplicatedLinear(hidden_size, 1, build)

    def partial(self, x: Tensor) -> Tensor:
        """x [T, D] -> this rank's part of sigmoid(gate(x)) * mlp(x) [T, D]"""
        return self.ops.sigmoid_gate(super().partial(x), self.gate(x))


class SparseMoE(Layer):
    """Each token goes through ``top_k`` experts, and the shared one if there is one; their weighted sum joins
    the residual."""

    def __init__(self, hidden_size: int, moe: MoeSpec, build: Build) -> None:
        super().__init__(build)
        router = SigmoidRouter if moe.scoring == "sigmoid" else SoftmaxRouter
        self.gate: SoftmaxRouter | SigmoidRouter = router(hidden_size, moe, build)
        self.experts = Experts(moe.num_experts, hidden_size, moe.intermediate_size, build)
        shared = moe.shared_intermediate_size
        self.shared_expert = SharedExpert(hidden_size, shared, build) if shared else None
        self.dispatcher: Dispatcher = LocalDispatcher(self.tp)
        self.counts: Tensor | None = None

    def record_counts(self, enabled: bool) -> None:
        """Start from zero, or stop, counting each expert's tokens (``counts``, int64 [num_experts])."""
        device = self.gate.weight.device
        self.counts = (
            torch.zeros(self.experts.num_experts, dtype=torch.int64, device=device) if enabled else None
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [T, D] -> residual + moe(x) [T, D]"""
        topk_ids, weights = self.gate(x)
        if self.counts is not None:
            self.counts += torch.bincount(topk_ids.flatten(), minlength=self.experts.num_experts)
        sent = self.dispatcher.dispatch(x, topk_ids, weights)
        if self.shared_expert is None and self.dispatcher.stays:
            return self.experts(sent.x, sent.topk_ids, sent.weights, residual)
        shared = None if self.shared_expert is None else self.shared_expert.partial(x)
        routed = self.experts(sent.x, sent.topk_ids, sent.weights)
        return self.dispatcher.combine(routed, shared) + residual
