"""RMSNorm, alone or with the addition before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.triton.device import dependent, enter

MAX_WIDTH = 1 << 15  # a row is held in registers
WIDTH_PER_WARP = 256  # 16 bytes of bfloat16 per thread


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, eps, x_stride, residual_stride,
    D: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < D
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    enter(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * D + column, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the next layer will add to
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    scaled = value * factor * gain
    tl.store(out + row * D + column, scaled.to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if width > MAX_WIDTH:
        raise ValueError(f"rows of at most {MAX_WIDTH} elements, got {width}")
    rows = x.reshape(-1, width)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    total = out if residual is None else torch.empty_like(out)
    added = rows if residual is None else residual.reshape(-1, width)
    pad = triton.next_power_of_2(width)
    if len(rows):
        _rms_norm[(len(rows),)](
            rows, added, weight, out, total, eps, rows.stride(0), added.stride(0),
            D=width, PAD=pad, ADD=residual is not None, num_warps=min(16, max(1, pad // WIDTH_PER_WARP)),
            **dependent(x),
        )  # fmt: skip
    return out.view(x.shape), total.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]; in float32, rounded once."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., D] -> (RMSNorm of their sum, the sum), both [..., D], in one pass. The sum is rounded
    to x's dtype before it is normed, as in two steps."""
    return _launch(x, residual, weight, eps)
