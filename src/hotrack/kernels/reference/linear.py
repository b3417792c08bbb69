"""Matrix products of a layer, with the elementwise step that follows them."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's gate (Shazeer, 2020): ``silu(gate) * up``. gate_up [..., 2 * I], gate first -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class LinearKernel:
    """``x @ weight.T + bias``; weight [N, K]. ``pack`` may make a copy in a faster layout, ``unpack``
    frees it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]"""
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [M, K], residual [M, N] -> residual + linear(x)"""
        return residual + self(x)

    def to_float(self, x: Tensor) -> Tensor:
        """x [M, K] -> linear(x) in float32"""
        return self(x).float()

    def pack(self) -> None:
        """Prepare for compute; the weight must be resident."""

    def unpack(self) -> None:
        """Undo ``pack``."""

    def packed_bytes(self) -> int:
        """Bytes of the private copy."""
        return 0

    def reads_weight(self) -> bool:
        """False while the private copy stands in for ``weight``."""
        return True


class GateUpKernel(LinearKernel):
    """``silu(gate(x)) * up(x)`` from one weight [2 * I, K], gate first."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, I]"""
        return silu_and_mul(F.linear(x, self.weight, self.bias))
