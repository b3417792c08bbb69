"""RMSNorm."""

from torch import Tensor

from hotrack.layers.base import Build, Layer


class RMSNorm(Layer):
    """``x / rms(x) * weight`` over the last dim; replicated on every rank."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__(build)
        self.eps = eps
        self.weight = self.declare(size)

    def bind(self) -> None:
        self.scale = self.weight.data

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        return self.ops.rms_norm(x, self.scale, self.eps)
