"""What surrounds the gated delta rule when it decodes, each in one kernel: convolution, gates, gated norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.recurrent import StatePlan

CHANNELS = 256  # of one program of the convolution
HEADS = 32  # of one token in one program of the gates


@triton.jit
def _conv_step(
    x, weight, states, read, write, fresh, out, x_stride, state_stride,
    C: tl.constexpr, PAST: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < C
    known = inside & (tl.load(fresh + sequence) == 0)
    source = states + tl.load(read + sequence) * state_stride + column
    target = states + tl.load(write + sequence) * state_stride + column
    taps = weight + column * (PAST + 1)
    new = tl.load(x + sequence * x_stride + column, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(taps + PAST, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(PAST):
        value = tl.load(source + tap * C, mask=known, other=0.0)
        total += value.to(tl.float32) * tl.load(taps + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:  # one place back; what was there has been read
            tl.store(target + (tap - 1) * C, value, mask=inside)
    tl.store(target + (PAST - 1) * C, new, mask=inside)
    result = total / (1.0 + tl.exp(-total))
    tl.store(out + sequence * C + column, result.to(out.dtype.element_ty), mask=inside)


def conv_step(x: Tensor, weight: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
    """:func:`~hotrack.kernels.reference.causal_conv.causal_conv1d` of a step with decodes only; x [B, C] and
    states [N, k - 1, C] dense but for the first dim, of one dtype -> [B, C]

    A sequence that reads and writes different rows must not read one that another writes in the same step.
    """
    B, C = x.shape
    out = torch.empty(B, C, dtype=x.dtype, device=x.device)
    if B:
        _conv_step[(B, triton.cdiv(C, CHANNELS))](
            x, weight, states, plan.read, plan.write, plan.fresh, out, x.stride(0), states.stride(0),
            C=C, PAST=weight.shape[1] - 1, COLS=CHANNELS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _delta_gates(
    a, b, a_log, dt_bias, g, beta, a_stride, b_stride, HV: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = head < HV
    step = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    # softplus, linear where exp would overflow
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    speed = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(g + token * HV + head, -speed * step, mask=inside)
    rate = tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + token * HV + head, 1.0 / (1.0 + tl.exp(-rate)), mask=inside)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference; rows of a and b dense."""
    T, Hv = a.shape
    g, beta = torch.empty(2, T, Hv, dtype=torch.float32, device=a.device)
    if T:
        _delta_gates[(T, triton.cdiv(Hv, HEADS))](
            a, b, a_log, dt_bias, g, beta, a.stride(0), b.stride(0), HV=Hv, COLS=HEADS, num_warps=1
        )
    return g, beta


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, eps, x_stride, gate_stride, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PAD)
    inside = column < D
    value = tl.load(x + token * x_stride + head * D + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    open_ = tl.load(gate + token * gate_stride + head * D + column, mask=inside, other=0.0).to(tl.float32)
    scaled = value * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = scaled * open_ / (1.0 + tl.exp(-open_))
    tl.store(out + (token * H + head) * D + column, result.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, for x and gate [T, H, D], dense but for the first dim."""
    T, H, D = x.shape
    out = torch.empty(T, H, D, dtype=gate.dtype, device=x.device)
    if T:
        _gated_rms_norm[(T, H)](
            x, gate, weight, out, eps, x.stride(0), gate.stride(0), H=H, D=D,
            PAD=triton.next_power_of_2(D), num_warps=1,
        )  # fmt: skip
    return out
