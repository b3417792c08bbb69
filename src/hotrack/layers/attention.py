"""Grouped-query attention (Ainslie et al., 2023) over the paged cache."""

from torch import Tensor

from hotrack.kvcache.spec import Paged
from hotrack.layers.base import Build, Layer
from hotrack.layers.linear import QKVParallelLinear, RowParallelLinear
from hotrack.layers.norm import RMSNorm
from hotrack.layers.step import Step
from hotrack.modelspec.spec import ModelSpec


class Attention(Layer):
    """Projections, optional RMSNorm of each q and k head, rotary embedding, attention, optional gate, output
    and residual."""

    def __init__(self, layer: int, spec: ModelSpec, build: Build) -> None:
        super().__init__(build)
        self.layer = layer
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.attention_bias,
            build,
            gated=spec.output_gate,
        )
        self.q_norm = head_norm(spec, build)
        self.k_norm = head_norm(spec, build)
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim, spec.hidden_size, spec.attention_bias, build
        )
        self.heads = self.qkv_proj.heads
        self.scale = spec.head_dim**-0.5

    def cache_spec(self) -> Paged:
        """What one token of this layer leaves in the cache on this rank."""
        return Paged(self.heads.num_kv_heads, self.heads.head_dim, self.heads.head_dim, self.dtype.itemsize)

    def forward(self, x: Tensor, residual: Tensor, step: Step) -> Tensor:
        """x, residual [T, D] -> residual + attention(x) [T, D]"""
        H, K, d = self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim
        kv, plan = step.kv.layers[self.layer], step.plans[step.kv.group_of[self.layer]]
        qkv, gate = self.qkv_proj(x), None  # [T, (H + 2 * K) * d], and H * d gates if there are any
        if self.qkv_proj.gated:
            qkv, gate = qkv.split(((H + 2 * K) * d, H * d), -1)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.kernel, self.k_norm.kernel
        self.ops.norm_rotate_and_cache(qkv, self.heads, norms, *step.rotary[0], kv, plan)
        q = qkv.view(-1, H + 2 * K, d)[:, :H]
        out = self.ops.paged_attention(q, kv, plan, self.scale)  # [T, H, d]
        out = out.reshape(-1, H * d)
        return self.o_proj(out if gate is None else self.ops.sigmoid_gate(out, gate), residual)


def head_norm(spec: ModelSpec, build: Build) -> RMSNorm | None:
    """The RMSNorm of each q or k head, if the model has it."""
    if not spec.qk_norm:
        return None
    return RMSNorm(spec.head_dim, spec.rms_norm_eps, build, zero_centred=spec.zero_centred_norm)
