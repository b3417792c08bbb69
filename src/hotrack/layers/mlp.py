"""The dense feed-forward block."""

from torch import Tensor

from hotrack.layers.base import Build, Layer
from hotrack.layers.linear import GateUpParallelLinear, RowParallelLinear


class GatedMLP(Layer):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, build: Build) -> None:
        super().__init__(build)
        self.gate_up_proj = GateUpParallelLinear(hidden_size, intermediate_size, bias, build)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, build)

    def partial(self, x: Tensor) -> Tensor:
        """x [T, D] -> this rank's part of mlp(x) [T, D]"""
        return self.down_proj.partial(self.gate_up_proj(x))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [T, D] -> residual + mlp(x) [T, D]"""
        return self.down_proj(self.gate_up_proj(x), residual)
