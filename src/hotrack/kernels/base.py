"""The kernels a model may call, each in plain torch.

A device's fast versions subclass :class:`Ops` and override what they improve.
"""

from typing import Protocol

import torch
from torch import Tensor

from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.recurrent import StatePlan
from hotrack.kernels.reference import attention, causal_conv, gated_delta, moe, rope
from hotrack.kernels.reference.linear import GateUpKernel, LinearKernel
from hotrack.kernels.reference.moe import Routed, SigmoidRouting
from hotrack.kernels.reference.norm import NormKernel


class Kernel(Protocol):
    """A kernel bound to one weight, of which it may keep a copy in a faster layout."""

    def pack(self) -> None:
        """Make the copy; the weight must be resident."""
        ...

    def unpack(self) -> None:
        """Free the copy."""
        ...

    def packed_bytes(self) -> int:
        """Size of the copy."""
        ...

    def reads_weight(self) -> bool:
        """False while the copy stands in for the weight, whose memory is then not read."""
        ...


class AttentionPlan:
    """What one step needs in every layer of a cache group, see :meth:`Ops.plan_attention`."""

    def __init__(self, batch: PagedBatch) -> None:
        self.batch = batch


class Ops:
    """Reference kernels for any device."""

    def rms_norm(self, weight: Tensor, eps: float) -> NormKernel:
        """A callable ``x [..., D] -> [..., D]`` for one weight [D]."""
        return NormKernel(weight, eps)

    def rope_tables(
        self, positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """positions int64 [T], inv_freq [dim/2] -> cos, sin [T, 1, dim], see ``reference.rope``."""
        return rope.rope_tables(positions, inv_freq, scale, dtype)

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates x [T, H, dim] in place."""
        x.copy_(rope.apply_rope(x, cos, sin))

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:  # noqa: ARG002
        """Once per step and cache group: everything about addressing and masking that layers share."""
        return AttentionPlan(batch)

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
        """qkv [T, (H + K) * d + K * v_dim]: ``norms`` over each head of q and of k, rotates them, caches k
        and v. q is changed in place; what is left of k in qkv is undefined."""
        if norms is not None:
            H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
            by_head = qkv[:, : (H + K) * d].view(-1, H + K, d)
            q, k = by_head[:, :H], by_head[:, H:]
            q.copy_(norms[0](q))
            k.copy_(norms[1](k))
        self.rotate_and_cache(qkv, heads, cos, sin, kv, plan)

    def rotate_and_cache(
        self, qkv: Tensor, heads: HeadShape, cos: Tensor, sin: Tensor, kv: LayerKV, plan: AttentionPlan
    ) -> None:
        """Rotates the first elements of the q and k heads of qkv [T, (H + K) * d + K * v_dim] in place, as
        many as cos has, then caches k and v."""
        H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
        self.apply_rope(qkv[:, : (H + K) * d].view(-1, H + K, d)[..., : cos.shape[-1]], cos, sin)
        self.write_kv(qkv[:, H * d :], kv, plan)

    def write_kv(self, new: Tensor, kv: LayerKV, plan: AttentionPlan) -> None:
        """new [T, H * k_dim + H * v_dim], K of every head then V of every head -> their cache slots."""
        attention.write_kv(new, kv, plan.batch.slot_mapping)

    def paged_attention(self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        """q [T, num_heads, dim] -> [T, num_heads, v_dim]"""
        return attention.paged_attention(q, kv, plan.batch, scale)

    def sink_attention(
        self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float, sinks: Tensor
    ) -> Tensor:
        """As :meth:`paged_attention`; sinks float32 [num_heads]: one more score per head, of no value."""
        return attention.paged_attention(q, kv, plan.batch, scale, sinks=sinks)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        """A callable ``x [M, K] -> [M, N]`` for one weight [N, K]."""
        return LinearKernel(weight, bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        """A callable ``x [M, K] -> silu(gate) * up [M, I]`` for one weight [2 * I, K]."""
        return GateUpKernel(weight, bias)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, D or 1] -> x * sigmoid(gate) [T, D]"""
        return x * gate.sigmoid()

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x float32, gate [T, H, D], weight [D] -> rms_norm(x) * silu(gate), gate's dtype"""
        return gated_delta.gated_rms_norm(x, gate, weight, eps)

    def causal_conv1d(self, x: Tensor, weight: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        """x [T, C], weight [C, k], states [N, k - 1, C] -> SiLU of the causal convolution [T, C]"""
        return causal_conv.causal_conv1d(x, weight, states, plan)

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """a, b [T, Hv], a_log, dt_bias [Hv] -> g (log of the decay), beta (rate), float32 [T, Hv]"""
        return gated_delta.delta_gates(a, b, a_log, dt_bias)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan
    ) -> Tensor:
        """q, k [T, Hk, k_dim], v [T, Hv, v_dim], g, beta float32 [T, Hv], states float32
        [N, Hv, k_dim, v_dim] -> float32 [T, Hv, v_dim]"""
        return gated_delta.gated_delta_rule(q, k, v, g, beta, states, plan)

    def softmax_topk(self, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> ids int64 or int32 [T, k], weights float32 [T, k]"""
        return moe.softmax_topk(logits, top_k, renormalize)

    def sigmoid_topk(self, x: Tensor, weight: Tensor, bias: Tensor, routing: SigmoidRouting) -> Routed:
        """x [T, D], weight float32 [E, D], bias float32 [E] -> ids int64 [T, k], weights float32 [T, k]"""
        return moe.sigmoid_topk(x, weight, bias, routing)

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
        """x [T, D] through the experts ``ids`` int64 or int32 [T, k], which are in the stacks' places
        ``slot_of`` int64 [num_experts], weighted, plus ``residual`` [T, D] if any -> [T, D]"""
        y = self.routed_experts(x, gate_up, down, slot_of[ids], weights)
        return y if residual is None else y + residual

    def routed_experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, weights: Tensor
    ) -> Tensor:
        """x [T, D] through the experts in ``slots`` int64 [T, k], weighted -> [T, D]"""
        return moe.moe_experts(x, gate_up, down, slots, weights)
