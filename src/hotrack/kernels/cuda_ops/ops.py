"""A GPU's versions of the kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.cuda_ops import attention, moe
from hotrack.kernels.cuda_ops.attention import CudaAttentionPlan
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.linear import LinearKernel
from hotrack.kernels.reference.norm import NormKernel


class FusedNorm(NormKernel):
    """torch's fused RMSNorm."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return super().__call__(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class AddingLinear(LinearKernel):
    """The residual joins inside the product."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.bias is not None:
            return super().add(x, residual)
        return torch.addmm(residual, x, self.weight.t())


class CudaOps(Ops):
    """No call waits for the device."""

    def rms_norm(self, weight: Tensor, eps: float) -> NormKernel:
        return FusedNorm(weight, eps)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin, out=x)

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:  # noqa: ARG002
        if batch.window or heads.v_dim != heads.head_dim:
            return AttentionPlan(batch)  # the reference does these
        if batch.block_stride % (batch.block_size * heads.head_dim):
            return AttentionPlan(batch)  # the packed row is no multiple of a page
        return CudaAttentionPlan(batch, heads)

    def write_kv(self, new: Tensor, kv: LayerKV, plan: AttentionPlan) -> None:
        if isinstance(plan, CudaAttentionPlan) and kv.rows is not None:
            attention.write_kv(new, kv.rows, plan)
        else:
            super().write_kv(new, kv, plan)

    def paged_attention(self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        if isinstance(plan, CudaAttentionPlan) and kv.rows is not None:
            return attention.paged_attention(q, kv.rows, plan, scale)
        return super().paged_attention(q, kv, plan, scale)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        return AddingLinear(weight, bias)

    def routed_experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor
    ) -> Tensor:
        return moe.moe_experts(x, gate_up, down, slots, weights)
