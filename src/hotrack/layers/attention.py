"""Grouped-query attention (Ainslie et al., 2023) over the paged cache."""

import torch
from torch import Tensor

from hotrack.kvcache.spec import Paged, Window
from hotrack.layers.base import Build, Layer, bias_of
from hotrack.layers.linear import QKVParallelLinear, RowParallelLinear
from hotrack.layers.norm import RMSNorm
from hotrack.layers.shard import Shard, span
from hotrack.layers.step import Step
from hotrack.modelspec.spec import ModelSpec


class Attention(Layer):
    """Projections, optional RMSNorm of each q and k head, rotary embedding, attention, optional gate, output
    and residual. A layer may have a window, with its own rotary embedding and number of K/V heads, and a sink
    per head."""

    def __init__(self, layer: int, spec: ModelSpec, build: Build) -> None:
        super().__init__(build)
        self.layer = layer
        self.window = window = spec.window_of(layer)
        self.rotary = 0 if window is None else 1  # index into Step.rotary
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads if window is None else window.num_kv_heads,
            spec.head_dim,
            spec.attention_bias,
            build,
            gated=spec.output_gate,
            value_dim=spec.v_head_dim,
            fused=spec.fused_qkv,
        )
        self.q_norm = head_norm(spec, build)
        self.k_norm = head_norm(spec, build)
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.value_dim, spec.hidden_size, spec.attention_bias, build
        )
        self.heads = self.qkv_proj.heads
        self.scale, self.value_scale = spec.head_dim**-0.5, spec.value_scale
        sinks = spec.full_sinks if window is None else window.sinks
        self.attention_sink_bias = self.declare(self.heads.num_heads, dtype=torch.float32) if sinks else None

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        return (Shard("", (), (span(self.tp.rank, self.heads.num_heads),)),)  # the sinks

    def bind(self) -> None:
        self.sinks = bias_of(self.attention_sink_bias)

    def cache_spec(self) -> Paged | Window:
        """What one token of this layer leaves in the cache on this rank."""
        heads, itemsize = self.heads, self.dtype.itemsize
        if self.window is None:
            return Paged(heads.num_kv_heads, heads.head_dim, heads.v_dim, itemsize)
        return Window(self.window.window, heads.num_kv_heads, heads.head_dim, heads.v_dim, itemsize)

    def forward(self, x: Tensor, residual: Tensor, step: Step) -> Tensor:
        """x, residual [T, D] -> residual + attention(x) [T, D]"""
        H, K, d, v_dim = self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim, self.heads.v_dim
        kv, plan = step.kv.layers[self.layer], step.plans[step.kv.group_of[self.layer]]
        qkv, gate = self.qkv_proj(x), None  # [T, (H + K) * d + K * v_dim], and H * d gates if there are any
        if self.qkv_proj.gated:
            qkv, gate = qkv.split(((H + K) * d + K * v_dim, H * d), -1)
        if self.value_scale != 1.0:
            qkv[:, (H + K) * d :].mul_(self.value_scale)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.kernel, self.k_norm.kernel
        self.ops.norm_rotate_and_cache(qkv, self.heads, norms, *step.rotary[self.rotary], kv, plan)
        q = qkv[:, : H * d].view(-1, H, d)
        if self.sinks is None:
            out = self.ops.paged_attention(q, kv, plan, self.scale)  # [T, H, v_dim]
        else:
            out = self.ops.sink_attention(q, kv, plan, self.scale, self.sinks)
        out = out.reshape(-1, H * v_dim)
        return self.o_proj(out if gate is None else self.ops.sigmoid_gate(out, gate), residual)


def head_norm(spec: ModelSpec, build: Build) -> RMSNorm | None:
    """The RMSNorm of each q or k head, if the model has it."""
    if not spec.qk_norm:
        return None
    return RMSNorm(spec.head_dim, spec.rms_norm_eps, build, zero_centred=spec.zero_centred_norm)
