"""A GPU's recurrent layers with these kernels in place."""

import torch
from torch import Tensor

from hotrack.kernels.base import Ops
from hotrack.kernels.recurrent import StatePlan
from hotrack.kernels.reference.gated_delta import chunked_rule
from hotrack.kernels.triton import recurrent, recurrent_steps


class TritonRecurrent(Ops):
    """Mix into a device's :class:`Ops`, first: chunks of prompts are left to the next class."""

    def causal_conv1d(self, x: Tensor, weight: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        if plan.chunks is not None:
            return super().causal_conv1d(x, weight, states, plan)
        return recurrent_steps.conv_step(x, weight, states, plan)

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return recurrent_steps.delta_gates(a, b, a_log, dt_bias)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan
    ) -> Tensor:
        n, chunks = plan.num_decodes, plan.chunks
        if not n:
            return super().gated_delta_rule(q, k, v, g, beta, states, plan)
        out = recurrent.delta_step(q[:n], k[:n], v[:n], g[:n], beta[:n], states, plan)
        if chunks is None:
            return out
        return torch.cat((out, chunked_rule(q, k, v, g, beta, states, plan, chunks)))

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return recurrent_steps.gated_rms_norm(x, gate, weight, eps)
