"""The dense feed-forward block."""

from torch import Tensor

from hotrack.layers.base import Build, Layer
from hotrack.layers.linear import GateUpParallelLinear, RowParallelLinear
from hotrack.modelspec.spec import ModelSpec


class GatedMLP(Layer):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(build)
        self.gate_up_proj = GateUpParallelLinear(
            spec.hidden_size, spec.intermediate_size, spec.mlp_bias, build
        )
        self.down_proj = RowParallelLinear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, build)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [T, D] -> residual + mlp(x) [T, D]"""
        return self.down_proj(self.gate_up_proj(x), residual)
