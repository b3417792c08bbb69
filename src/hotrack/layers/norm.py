"""RMSNorm."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hotrack.kernels.base import Kernel
from hotrack.layers.base import Build, Layer
from hotrack.layers.shard import WHOLE, Shard


class RMSNorm(Layer):
    """``x / rms(x) * weight`` over the last dim; replicated on every rank.

    ``zero_centred``: the checkpoint has ``weight - 1``. The sum is kept in float32, because near 1 bfloat16
    would round away most of what was stored.
    """

    def __init__(self, size: int, eps: float, build: Build, *, zero_centred: bool = False) -> None:
        super().__init__(build)
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = self.declare(size, dtype=torch.float32 if zero_centred else None)

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        return (Shard(add=1.0),) if self.zero_centred else WHOLE

    def bind(self) -> None:
        self.kernel = self.ops.rms_norm(self.weight.data, self.eps)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        return self.kernel(x)
