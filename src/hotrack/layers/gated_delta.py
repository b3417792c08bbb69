"""Gated DeltaNet (Yang et al., 2024): a layer whose memory of the past is one matrix per head."""

import torch
from torch import Tensor

from hotrack.kernels.recurrent import StatePlan
from hotrack.kvcache.spec import State, StateTensor
from hotrack.layers.base import Build, Layer
from hotrack.layers.linear import ReplicatedLinear, RowParallelLinear
from hotrack.layers.shard import Shard, divide, span
from hotrack.layers.step import Step
from hotrack.modelspec.spec import GatedDeltaSpec, ModelSpec


class DeltaHeads:
    """The key heads of one rank, each with its ``repeat`` value heads."""

    def __init__(self, delta: GatedDeltaSpec, build: Build) -> None:
        self.keys = divide(delta.num_key_heads, build.tp.size, "linear-attention key heads")
        self.repeat = delta.num_value_heads // delta.num_key_heads
        self.values = self.keys * self.repeat
        self.key_dim, self.value_dim = delta.key_head_dim, delta.value_head_dim
        self.first = build.tp.rank * self.keys
        self.all_keys = delta.num_key_heads
        # Widths of q (and of k), and of v (and of z)
        self.key_width, self.value_width = self.keys * self.key_dim, self.values * self.value_dim


class InterleavedLinear(ReplicatedLinear):
    """Several projections as one matrix, split by key head.

    Published head by head, with ``widths`` rows of each projection; here each projection is one run of rows.
    """

    def __init__(self, hidden_size: int, widths: tuple[int, ...], heads: DeltaHeads, build: Build) -> None:
        super().__init__(hidden_size, sum(widths) * heads.keys, build)
        self.widths, self.heads = widths, heads

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        found, width, row = [], sum(self.widths), 0
        before = 0  # rows of a published head that come before this projection's
        for part in self.widths:
            for head in range(self.heads.first, self.heads.first + self.heads.keys):
                published = head * width + before
                found.append(Shard("", (slice(row, row + part),), (slice(published, published + part),)))
                row += part
            before += part
        return tuple(found)


class CausalConv1d(Layer):
    """One kernel per channel of q, k and v, split by key head within each of the three."""

    def __init__(self, kernel: int, heads: DeltaHeads, build: Build) -> None:
        super().__init__(build)
        self.heads = heads
        self.channels = 2 * heads.key_width + heads.value_width
        self.taps_before = kernel - 1  # inputs kept between steps
        self.weight = self.declare(self.channels, 1, kernel)

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        heads, size, rank = self.heads, self.tp.size, self.tp.rank
        found, row, published = [], 0, 0
        for width in (heads.key_width, heads.key_width, heads.value_width):
            first = published + rank * width
            found.append(Shard("", (slice(row, row + width),), (slice(first, first + width),)))
            row, published = row + width, published + size * width
        return tuple(found)

    def bind(self) -> None:
        self.taps = self.weight.data.squeeze(1)

    def forward(self, x: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        """x [T, channels], states [N, kernel - 1, channels] -> [T, channels]"""
        return self.ops.causal_conv1d(x, self.taps, states, plan)


class GatedRMSNorm(Layer):
    """RMSNorm of each head, times silu of its gate."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__(build)
        self.eps = eps
        self.weight = self.declare(size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x float32, gate [T, heads, size] -> [T, heads, size]"""
        return self.ops.gated_rms_norm(x, gate, self.weight.data, self.eps)


class GatedDeltaNet(Layer):
    """Projections, causal convolution of q, k and v, gated delta rule, gated norm, output and residual."""

    def __init__(self, layer: int, spec: ModelSpec, delta: GatedDeltaSpec, build: Build) -> None:
        super().__init__(build)
        self.layer = layer
        self.heads = heads = DeltaHeads(delta, build)
        values = heads.repeat * heads.value_dim
        self.in_proj_qkvz = InterleavedLinear(
            spec.hidden_size, (heads.key_dim, heads.key_dim, values, values), heads, build
        )
        self.in_proj_ba = InterleavedLinear(spec.hidden_size, (heads.repeat, heads.repeat), heads, build)
        self.conv1d = CausalConv1d(delta.conv_kernel, heads, build)
        # The decay is exp of exp of these: bfloat16 would be too coarse for a model that is trained in more.
        self.A_log = self.declare(heads.values, dtype=torch.float32)
        self.dt_bias = self.declare(heads.values, dtype=torch.float32)
        self.norm = GatedRMSNorm(heads.value_dim, spec.rms_norm_eps, build)
        self.out_proj = RowParallelLinear(
            delta.num_value_heads * delta.value_head_dim, spec.hidden_size, False, build
        )

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        return (Shard("", (), (span(self.tp.rank, self.heads.values),)),)  # A_log and dt_bias

    def cache_spec(self) -> State:
        """What a sequence keeps on this rank: the convolution's last inputs, and a matrix per value head."""
        heads, conv = self.heads, self.conv1d
        inputs = StateTensor((conv.taps_before, conv.channels), str(self.dtype).removeprefix("torch."))
        return State((inputs, StateTensor((heads.values, heads.key_dim, heads.value_dim), "float32")))

    def mix(self, x: Tensor, inputs: Tensor, matrices: Tensor, plan: StatePlan) -> Tensor:
        """x [T, D] -> what the output projection takes [T, values * value_dim].

        inputs [N, kernel - 1, channels] and matrices float32 [N, values, key_dim, value_dim]: the states of
        all sequences, those of the step's brought up to date.
        """
        heads = self.heads
        qkvz, (b, a) = self.in_proj_qkvz(x), self.in_proj_ba(x).chunk(2, -1)
        mixed = self.conv1d(qkvz[:, : self.conv1d.channels], inputs, plan)
        q, k, v = mixed.split((heads.key_width, heads.key_width, heads.value_width), -1)
        g, beta = self.ops.delta_gates(a, b, self.A_log.data, self.dt_bias.data)
        out = self.ops.gated_delta_rule(
            q.view(-1, heads.keys, heads.key_dim),
            k.view(-1, heads.keys, heads.key_dim),
            v.view(-1, heads.values, heads.value_dim),
            *(g, beta, matrices, plan),
        )
        z = qkvz[:, self.conv1d.channels :].view(-1, heads.values, heads.value_dim)
        return self.norm(out, z).flatten(1)

    def forward(self, x: Tensor, residual: Tensor, step: Step) -> Tensor:
        """x, residual [T, D] -> residual + deltanet(x) [T, D]"""
        inputs, matrices = step.kv.states[self.layer]
        plan = step.states[step.kv.group_of[self.layer]]
        return self.out_proj(self.mix(x, inputs, matrices, plan), residual)
