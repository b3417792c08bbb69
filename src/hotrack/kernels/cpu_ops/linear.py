"""bf16 matrix products from weights reordered once for oneDNN."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.reference.linear import LinearKernel

# oneDNN packs for a row count; on AVX-512 every hint gives the same blocked layout, fast from 1 row to 512.
ROWS_HINT = 32

_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a bf16 path here; without one the plain product is as good."""
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


class PackedLinear(LinearKernel):
    """A plain product until ``pack``; afterwards ``weight`` is not read."""

    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().__call__(x)
        return _linear(x, self.packed, self.bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.packed is None:
            return super().add(x, residual)
        return _linear_binary(x, residual, self.packed, self.bias, "add")

    def pack(self) -> None:
        if self.packed is None and can_pack(self.weight):
            self.packed = _pack(self.weight)

    def unpack(self) -> None:
        self.packed = None

    def packed_bytes(self) -> int:
        return 0 if self.packed is None else self.weight.nbytes

    def reads_weight(self) -> bool:
        return self.packed is None


class PackedGateUp(PackedLinear):
    """``silu(gate(x)) * up(x)``. One product over both halves beats two with fused activations at one row,
    where streaming the weights is everything."""

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = super().__call__(x)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
