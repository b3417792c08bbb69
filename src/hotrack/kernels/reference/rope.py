"""Rotary position embedding, NeoX order: element i is paired with element i + dim / 2."""

import torch
from torch import Tensor


def rope_tables(
    positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions int64 [T], inv_freq float32 [dim/2] -> cos, sin [T, 1, dim].

    The first half of ``sin`` is negated, so that rotating is ``x * cos + roll(x, dim / 2) * sin``. ``scale``
    multiplies both (YaRN's attention factor).
    """
    angles = positions.float()[:, None] * inv_freq  # [T, dim/2]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, dim], cos and sin of :func:`rope_tables` -> [T, H, dim]. Sums in float32."""
    x32 = x.float()
    return (x32 * cos.float() + torch.roll(x32, x.shape[-1] // 2, -1) * sin.float()).to(x.dtype)
