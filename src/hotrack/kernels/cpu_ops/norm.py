"""RMSNorm through torch's fused LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.reference.norm import NormKernel

# Up to this many elements the doubled row costs less than the separate passes of torch's own rms_norm.
MAX_ELEMENTS = 16 * 1024


class DoubledNorm(NormKernel):
    """The row (x, -x) has mean 0 and variance mean(x^2), so its LayerNorm is the RMSNorm of x.

    Three kernels instead of six.
    """

    doubled: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return super().__call__(x)
        size = self.weight.shape
        if self.doubled is None or x.numel() > MAX_ELEMENTS:
            return F.rms_norm(x, size, self.weight, self.eps)
        rows = torch.cat((x, -x), -1)
        return torch.layer_norm(rows, self.doubled.shape, self.doubled, None, self.eps)[..., : size[0]]

    def pack(self) -> None:
        self.doubled = torch.cat((self.weight, torch.zeros_like(self.weight)))

    def unpack(self) -> None:
        self.doubled = None

    def packed_bytes(self) -> int:
        return 0 if self.doubled is None else self.doubled.nbytes
