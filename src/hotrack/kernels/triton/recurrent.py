"""One token of the gated delta rule: each state is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.recurrent import StatePlan
from hotrack.kernels.reference.gated_delta import NORM_EPS

COLUMNS = 32  # of a state in one program: 32 registers per thread at 128 rows
WARPS = 4


@triton.jit
def _unit_row(at, column, WIDTH: tl.constexpr, EPS: tl.constexpr):
    row = tl.load(at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return row / tl.sqrt(tl.sum(row * row, 0) + EPS)


@triton.jit
def _delta_step(
    q, k, v, g, beta, read, write, fresh, states, out, scale,
    q_stride, k_stride, v_stride, g_stride, beta_stride, state_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAD_K: tl.constexpr, COLS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, PAD_K)
    column = tl.program_id(2) * COLS + tl.arange(0, COLS)
    of_key = head // REPEAT * K_DIM
    query = _unit_row(q + sequence * q_stride + of_key, row, K_DIM, EPS) * scale
    key = _unit_row(k + sequence * k_stride + of_key, row, K_DIM, EPS)
    value = tl.load(v + sequence * v_stride + head * V_DIM + column, mask=column < V_DIM, other=0.0)
    decay = tl.exp(tl.load(g + sequence * g_stride + head))
    rate = tl.load(beta + sequence * beta_stride + head)
    place = head * K_DIM * V_DIM + row[:, None] * V_DIM + column[None, :]
    inside = (row < K_DIM)[:, None] & (column < V_DIM)[None, :]
    known = inside & (tl.load(fresh + sequence) == 0)
    state = tl.load(states + tl.load(read + sequence) * state_stride + place, mask=known, other=0.0) * decay
    answer = tl.sum(state * key[:, None], 0)
    state += key[:, None] * (rate * (value.to(tl.float32) - answer))[None, :]
    tl.store(states + tl.load(write + sequence) * state_stride + place, state, mask=inside)
    answer = tl.sum(state * query[:, None], 0)
    tl.store(out + (sequence * HV + head) * V_DIM + column, answer, mask=column < V_DIM)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan
) -> Tensor:
    """The decodes of ``plan``: q, k [B, Hk, k_dim], v [B, Hv, v_dim], g, beta float32 [B, Hv], the last two
    dims of q, k, v dense; states float32 [N, Hv, k_dim, v_dim], dense but for the first dim; brought up to
    date -> float32 [B, Hv, v_dim]

    A sequence that reads and writes different rows must not read one that another writes in the same step.
    """
    (B, Hk, k_dim), (Hv, v_dim) = k.shape, v.shape[1:]
    out = torch.empty(B, Hv, v_dim, dtype=torch.float32, device=q.device)
    columns = min(COLUMNS, triton.next_power_of_2(v_dim))
    if B:
        _delta_step[(B, Hv, triton.cdiv(v_dim, columns))](
            q, k, v, g, beta, plan.read, plan.write, plan.fresh, states, out, k_dim**-0.5,
            q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), states.stride(0),
            HV=Hv, REPEAT=Hv // Hk, K_DIM=k_dim, V_DIM=v_dim, PAD_K=triton.next_power_of_2(k_dim),
            COLS=columns, EPS=NORM_EPS, num_warps=WARPS,
        )  # fmt: skip
    return out
