"""The gated delta rule (Yang et al., 2024, Gated Delta Networks).

Each value head keeps a matrix S [k_dim, v_dim] that maps keys to values. A token lets it decay, corrects
what it answers for the token's key, and reads the answer for its query:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.recurrent import Chunks, StatePlan

NORM_EPS = 1e-6


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan
) -> Tensor:
    """q, k [T, Hk, k_dim], v [T, Hv, v_dim]; g (log of the decay, <= 0), beta float32 [T, Hv] ->
    float32 [T, Hv, v_dim].

    Query and key head h serve value heads h * r .. h * r + r - 1. q and k are normalised to length 1 first, q
    is then scaled by k_dim ** -0.5. states float32 [N, Hv, k_dim, v_dim]: those of the step's sequences are
    brought up to date. Computed in float32.
    """
    parts = []
    if n := plan.num_decodes:
        state = plan.load(states, 0, n)
        out, state = recurrent_step(*prepared(q[:n], k[:n], v[:n]), g[:n], beta[:n], state)
        plan.store(states, state, 0, n)
        parts.append(out)
    if plan.chunks is not None:
        parts.append(chunked_rule(q, k, v, g, beta, states, plan, plan.chunks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def chunked_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan, chunks: Chunks
) -> Tensor:
    """:func:`gated_delta_rule` of the sequences that are no decodes -> [T', Hv, v_dim]"""
    state = plan.load(states, plan.num_decodes)
    out, state = chunked_scan(*prepared(q, k, v), g, beta, state, chunks)
    plan.store(states, state, plan.num_decodes)
    return out


def prepared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with rows of length 1, q scaled, all in float32."""
    return unit_rows(q.float()) * q.shape[-1] ** -0.5, unit_rows(k.float()), v.float()


def unit_rows(x: Tensor) -> Tensor:
    """x [..., D] scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences. q, k [B, Hk, k_dim], v [B, Hv, v_dim], g, beta [B, Hv],
    state [B, Hv, k_dim, v_dim] -> out [B, Hv, v_dim] and the new state, all float32. ``state`` is used up."""
    repeat = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    state = state.mul_(g.exp()[..., None, None])
    answer = torch.matmul(k[..., None, :], state)  # [B, Hv, 1, v_dim]
    state = state.addcmul_(k[..., :, None], (v[..., None, :] - answer) * beta[..., None, None])
    return torch.matmul(q[..., None, :], state).squeeze(-2), state


def chunked_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, given: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """The sequences that are no decodes, chunk by chunk; q, k, v, g, beta of all T tokens as in
    :func:`recurrent_step`, given [S', Hv, k_dim, v_dim] -> out [T', Hv, v_dim] and the new states.

    Within a chunk the corrections u = beta (v - S^T k) solve one unit triangular system, because each depends
    on those before it (the WY form): with G the running sum of g,

        u_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S_0^T k_i)

    It is solved for both terms of the right side before S_0 is known; only the products with S_0 are left to
    the scan, where all sequences take their turns together.
    """
    Hk, Hv, size = k.shape[1], v.shape[1], chunks.size

    def cut(x: Tensor, heads: int) -> Tensor:
        """[T, heads * r, ...] -> [N, heads, r, size, ...]"""
        found = x.index_select(0, chunks.tokens)
        return found.view(-1, size, heads, x.shape[1] // heads, *x.shape[2:]).movedim(1, 3)

    q, k, v = cut(q, Hk), cut(k, Hk), cut(v, Hk)  # [N, Hk, 1 | r, size, dim]
    hole = chunks.padding.view(-1, 1, 1, size)
    beta = cut(beta, Hk).masked_fill(hole, 0)[..., None]  # [N, Hk, r, size, 1]
    total = cut(g, Hk).masked_fill(hole, 0).cumsum(-1)  # [N, Hk, r, size]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    # Above the diagonal exp could overflow, so the mask comes first.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    seen, end = total.exp()[..., None], total[..., -1:]  # [N, Hk, r, size, 1], [N, Hk, r, 1]
    system = torch.matmul(k, k.mT) * decay * beta  # its diagonal is taken as 1, what is above is 0
    corrections, reads = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, k * (beta * seen)), -1), upper=False, unitriangular=True
    ).split((v.shape[-1], k.shape[-1]), -1)
    within = torch.matmul(q, k.mT) * decay
    queries, keys, kept = q * seen, k * (end - total).exp()[..., None], end.exp()[..., None]

    # [S', Hk, r, k_dim, v_dim]
    state = given.index_select(0, chunks.order).view(len(given), Hk, Hv // Hk, *given.shape[2:])
    out, first = torch.empty_like(corrections), 0
    for active in chunks.active:
        turn = slice(first, first + active)
        first += active
        S = state[:active]
        u = corrections[turn] - torch.matmul(reads[turn], S)
        out[turn] = torch.matmul(queries[turn], S) + torch.matmul(within[turn], u)
        S.mul_(kept[turn]).add_(torch.matmul(keys[turn].mT, u))
    found = torch.empty_like(given).index_copy_(0, chunks.order, state.flatten(1, 2))
    out = out.movedim(3, 1).reshape(-1, Hv, v.shape[-1])  # [N * size, Hv, v_dim]
    return out.index_select(0, chunks.places), found


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D] with weight [D], times silu(gate [..., D]), in float32 -> gate's dtype"""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float() * F.silu(gate.float())).to(gate.dtype)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """a, b [T, Hv]; a_log, dt_bias [Hv] -> g (log of the decay), beta, float32 [T, Hv]"""
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()
