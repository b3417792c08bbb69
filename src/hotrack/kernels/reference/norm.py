"""RMS normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in float32. x [..., D], weight [D] -> [..., D]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)
