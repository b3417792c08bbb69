"""A GPU's kernels with the fused ones in place."""

import torch
from torch import Tensor

from hotrack.kernels.base import AttentionPlan
from hotrack.kernels.cuda_ops import attention
from hotrack.kernels.cuda_ops.attention import CudaAttentionPlan
from hotrack.kernels.cuda_ops.ops import AddingLinear, CudaOps
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.linear import LinearKernel
from hotrack.kernels.reference.norm import NormKernel
from hotrack.kernels.triton import gemv, moe_grouped, moe_routing
from hotrack.kernels.triton.attention_decode import can_decode, decode_attention
from hotrack.kernels.triton.ops import TritonAttention, TritonAttentionPlan
from hotrack.kernels.triton.recurrent_ops import TritonRecurrent
from hotrack.kernels.triton.rope_cache import rotate_and_cache
from hotrack.kernels.triton.silu import silu_and_mul

GENERAL = TritonAttention()  # decode steps, windows, sinks, values of another width


class FewRows(AddingLinear):
    """cuBLAS, but for the few rows of a decode step the weight is streamed by a kernel of ours."""

    def takes(self, x: Tensor) -> bool:
        N, K = self.weight.shape
        return gemv.wins(len(x), N, K) and x.dtype == self.weight.dtype and x.stride(1) == 1

    def __call__(self, x: Tensor) -> Tensor:
        return gemv.linear(x, self.weight, self.bias) if self.takes(x) else super().__call__(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if not self.takes(x) or not residual.is_contiguous():
            return super().add(x, residual)
        return gemv.linear(x, self.weight, self.bias, residual)

    def to_float(self, x: Tensor) -> Tensor:
        return (
            gemv.linear(x, self.weight, self.bias, dtype=torch.float32)
            if self.takes(x)
            else super().to_float(x)
        )


class FusedGateUp(FewRows):
    """``silu(gate(x)) * up(x)``, the activation in one kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        return silu_and_mul(super().__call__(x))


class TritonOps(TritonRecurrent, CudaOps):
    """Falls back to :class:`CudaOps` for shapes a kernel does not take."""

    def rms_norm(self, weight: Tensor, eps: float) -> NormKernel:
        return GENERAL.rms_norm(weight, eps)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        return FewRows(weight, bias)

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:
        only_decodes = batch.num_decodes == len(batch.seq_lens)  # as in a captured graph: nothing is prepared
        if only_decodes or batch.window is not None or heads.v_dim != heads.head_dim:
            return GENERAL.plan_attention(batch, heads, dtype)
        if batch.block_stride % (batch.block_size * heads.head_dim):
            return GENERAL.plan_attention(batch, heads, dtype)
        fits = can_decode(heads.num_heads, heads.num_kv_heads, 1)
        return CudaAttentionPlan(batch, heads, batch.num_decodes if fits else 0)

    def norm_rotate_and_cache(
        self,
        qkv: Tensor,
        heads: HeadShape,
        norms: tuple[NormKernel, NormKernel] | None,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        plan: AttentionPlan,
    ) -> None:
        weights = None if norms is None else (norms[0].weight, norms[1].weight)
        eps = 0.0 if norms is None else norms[0].eps
        rotate_and_cache(qkv, heads, cos, sin, kv, plan.batch.slot_mapping, weights, eps)

    def paged_attention(self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        if isinstance(plan, TritonAttentionPlan):
            return GENERAL.paged_attention(q, kv, plan, scale)
        if not isinstance(plan, CudaAttentionPlan) or kv.rows is None or not plan.num_elsewhere:
            return super().paged_attention(q, kv, plan, scale)
        batch, count = plan.batch, plan.num_elsewhere
        assert batch.seq_lens_device is not None, "the plan asked for them"
        lens = batch.seq_lens_device[:count]
        longest = max(batch.seq_lens[:count])
        decoded = decode_attention(q[:count], kv, batch.block_tables[:count], lens, longest, scale)
        return torch.cat((decoded, attention.paged_attention(q, kv.rows, plan, scale)))

    def sink_attention(
        self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float, sinks: Tensor
    ) -> Tensor:
        return GENERAL.sink_attention(q, kv, plan, scale, sinks)

    def gate_up(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        return FusedGateUp(weight, bias)

    def softmax_topk(self, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        if logits.shape[1] > moe_routing.MAX_EXPERTS:
            return super().softmax_topk(logits, top_k, renormalize)
        return moe_routing.softmax_topk(logits, top_k, renormalize)

    def moe_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        ids: Tensor,
        weights: Tensor,
        residual: Tensor | None,
        slot_of: Tensor,
    ) -> Tensor:
        return moe_grouped.moe_experts(x.contiguous(), gate_up, down, ids, weights, residual, table=slot_of)
