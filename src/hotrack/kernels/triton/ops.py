"""A GPU's attention with these kernels in place."""

import torch
from torch import Tensor

from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.norm import NormKernel
from hotrack.kernels.triton import rms_norm, rope_cache
from hotrack.kernels.triton.attention_decode import can_decode, decode_attention
from hotrack.kernels.triton.attention_prefill import prefill_attention

MAX_HEAD_DIM = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonAttentionPlan(AttentionPlan):
    """Lengths of a step. Nothing is computed on the device: a captured graph may read new ones in place."""

    def __init__(self, batch: PagedBatch, num_decodes: int) -> None:
        super().__init__(batch)
        assert batch.query_start is not None, "the device's kernels need device offsets"
        assert batch.seq_lens_device is not None, "the device's kernels need device lengths"
        self.query_start, self.seq_lens = batch.query_start, batch.seq_lens_device
        self.num_decodes = num_decodes
        self.longest_decode = max(batch.seq_lens[:num_decodes], default=0)
        self.prefill_tokens = sum(batch.query_lens[num_decodes:])


class TritonNorm(NormKernel):
    """RMSNorm in one kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm.rms_norm(x, self.weight, self.eps)


class TritonAttention(Ops):
    """Mix into a device's :class:`Ops`, first: what these kernels do not take is left to the next class."""

    def rms_norm(self, weight: Tensor, eps: float) -> NormKernel:
        if len(weight) > rms_norm.MAX_WIDTH:
            return super().rms_norm(weight, eps)
        return TritonNorm(weight, eps)

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:
        if heads.head_dim > MAX_HEAD_DIM or dtype not in DTYPES:
            return super().plan_attention(batch, heads, dtype)
        fits = can_decode(heads.num_heads, heads.num_kv_heads, 1)
        return TritonAttentionPlan(batch, batch.num_decodes if fits else 0)

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
        if not isinstance(plan, TritonAttentionPlan):
            super().norm_rotate_and_cache(qkv, heads, norms, cos, sin, kv, plan)
            return
        weights = None if norms is None else (norms[0].weight, norms[1].weight)
        eps = 0.0 if norms is None else norms[0].eps
        rope_cache.rotate_and_cache(qkv, heads, cos, sin, kv, plan.batch.slot_mapping, weights, eps)

    def rotate_and_cache(
        self, qkv: Tensor, heads: HeadShape, cos: Tensor, sin: Tensor, kv: LayerKV, plan: AttentionPlan
    ) -> None:
        if isinstance(plan, TritonAttentionPlan):
            self.norm_rotate_and_cache(qkv, heads, None, cos, sin, kv, plan)
        else:
            super().rotate_and_cache(qkv, heads, cos, sin, kv, plan)

    def paged_attention(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        if not isinstance(plan, TritonAttentionPlan):
            return super().paged_attention(q, kv, plan, scale)
        return self._attend(q, kv, plan, scale, None)

    def sink_attention(
        self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float, sinks: Tensor
    ) -> Tensor:
        if not isinstance(plan, TritonAttentionPlan):
            return super().sink_attention(q, kv, plan, scale, sinks)
        return self._attend(q, kv, plan, scale, sinks)

    def _attend(
        self, q: Tensor, kv: LayerKV, plan: TritonAttentionPlan, scale: float, sinks: Tensor | None
    ) -> Tensor:
        batch, decodes = plan.batch, plan.num_decodes
        out = torch.empty(len(q), q.shape[1], kv.v.shape[3], dtype=q.dtype, device=q.device)
        if decodes:
            decode_attention(
                q[:decodes],
                kv,
                batch.block_tables[:decodes],
                plan.seq_lens[:decodes],
                plan.longest_decode,
                scale,
                window=batch.window,
                sinks=sinks,
                out=out[:decodes],
            )
        if plan.prefill_tokens:
            prefill_attention(
                q,
                kv,
                batch.block_tables[decodes:],
                plan.query_start[decodes:],
                plan.seq_lens[decodes:],
                plan.prefill_tokens,
                scale,
                window=batch.window,
                sinks=sinks,
                out=out,
            )
        return out
