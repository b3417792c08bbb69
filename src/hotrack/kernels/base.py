"""The kernels a model may call, each in plain torch. A device's fast versions subclass this and override what they improve."""

import torch
from torch import Tensor

from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference import attention, moe, norm, rope
from hotrack.kernels.reference.linear import GateUpKernel, LinearKernel


class AttentionPlan:
    """What one step needs in every layer of a cache group; made once per step by :meth:`Ops.plan_attention`."""

    def __init__(self, batch: PagedBatch) -> None:
        self.batch = batch


class Ops:
    """Reference kernels for any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D], weight [D] -> [..., D]"""
        return norm.rms_norm(x, weight, eps)

    def rope_tables(
        self, positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """positions int64 [T], inv_freq [dim/2] -> cos, sin [T, 1, dim], see :func:`reference.rope.rope_tables`."""
        return rope.rope_tables(positions, inv_freq, scale, dtype)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates x [T, H, dim] in place."""
        x.copy_(rope.apply_rope(x, cos, sin))

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:
        """Once per step and cache group: everything about addressing and masking that layers share."""
        return AttentionPlan(batch)

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, plan: AttentionPlan) -> None:
        """k [T, H, k_dim], v [T, H, v_dim] -> their slots in the cache."""
        attention.write_kv(k, v, kv, plan.batch.slot_mapping)

    def paged_attention(self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        """q [T, num_heads, dim] -> [T, num_heads, v_dim]"""
        return attention.paged_attention(q, kv, plan.batch, scale)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        """A callable ``x [M, K] -> [M, N]`` for one weight [N, K]."""
        return LinearKernel(weight, bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        """A callable ``x [M, K] -> silu(gate) * up [M, I]`` for one weight [2 * I, K]."""
        return GateUpKernel(weight, bias)

    def softmax_topk(self, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> ids int64 [T, k], weights float32 [T, k]"""
        return moe.softmax_topk(logits, top_k, renormalize)

    def moe_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """x [T, D] through the experts in ``slots`` [T, k], weighted -> [T, D]"""
        return moe.moe_experts(x, gate_up, down, slots, weights)
