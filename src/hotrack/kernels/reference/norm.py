"""RMS normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in float32. x [..., D], weight [D]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


class NormKernel:
    """:func:`rms_norm` with one weight. ``pack`` may prepare a private copy of the weight, ``unpack``
    frees it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        return rms_norm(x, self.weight, self.eps)

    def pack(self) -> None:
        """Prepare for compute; the weight must be resident."""

    def unpack(self) -> None:
        """Undo ``pack``."""

    def packed_bytes(self) -> int:
        """Bytes of the private copy."""
        return 0

    def reads_weight(self) -> bool:
        """Whether ``weight`` itself is still read."""
        return True
