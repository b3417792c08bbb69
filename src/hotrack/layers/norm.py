"""RMSNorm."""

from collections.abc import Iterator

from torch import Tensor

from hotrack.kernels.base import Kernel
from hotrack.layers.base import Build, Layer


class RMSNorm(Layer):
    """``x / rms(x) * weight`` over the last dim; replicated on every rank."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__(build)
        self.eps = eps
        self.weight = self.declare(size)

    def bind(self) -> None:
        self.kernel = self.ops.rms_norm(self.weight.data, self.eps)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        return self.kernel(x)
