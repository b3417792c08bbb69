"""The CPU's versions of the kernels."""

import torch
from torch import Tensor

from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.cpu_ops import attention, moe
from hotrack.kernels.cpu_ops.attention import CpuAttentionPlan
from hotrack.kernels.cpu_ops.linear import PackedGateUp, PackedLinear
from hotrack.kernels.cpu_ops.norm import DoubledNorm
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.linear import LinearKernel
from hotrack.kernels.reference.norm import NormKernel


class CpuOps(Ops):
    """Few, large torch calls: at one token a call costs as much as its work."""

    def rms_norm(self, weight: Tensor, eps: float) -> NormKernel:
        return DoubledNorm(weight, eps)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin, out=x)

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:
        if batch.window or heads.v_dim != heads.head_dim:
            return AttentionPlan(batch)  # the reference does these
        if batch.block_stride % (batch.block_size * heads.head_dim):
            return AttentionPlan(batch)  # the packed row is no multiple of a page
        return CpuAttentionPlan(batch, heads, dtype)

    def write_kv(self, new: Tensor, kv: LayerKV, plan: AttentionPlan) -> None:
        if isinstance(plan, CpuAttentionPlan) and kv.rows is not None:
            attention.write_kv(new, kv.rows, plan)
        else:
            super().write_kv(new, kv, plan)

    def paged_attention(self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        if isinstance(plan, CpuAttentionPlan) and kv.pages is not None:
            return attention.paged_attention(q, kv.pages, plan, scale)
        return super().paged_attention(q, kv, plan, scale)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        return PackedLinear(weight, bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        return PackedGateUp(weight, bias)

    def routed_experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor
    ) -> Tensor:
        return moe.moe_experts(x, gate_up, down, slots, weights)
