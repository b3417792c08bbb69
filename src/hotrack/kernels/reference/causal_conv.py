"""Depthwise causal convolution over the tokens of each sequence, its last inputs kept between steps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.recurrent import StatePlan


def causal_conv1d(x: Tensor, weight: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
    """SiLU of the convolution of x [T, C] with weight [C, k], channel by channel, over each token and the
    k - 1 before it -> [T, C]. Sums in float32.

    states [N, k - 1, C]: the last inputs of each sequence, oldest first; those of the step's sequences are
    brought up to date.
    """
    past = weight.shape[1] - 1
    taps = plan.taps(past)
    known = torch.cat((plan.load(states).flatten(0, 1), x))
    out = x.float() * weight[:, past].float()
    for tap in range(past):
        out.addcmul_(known.index_select(0, taps.inputs[tap]).float(), weight[:, tap].float())
    plan.store(states, known.index_select(0, taps.last).view(-1, past, x.shape[1]))
    return F.silu(out).to(x.dtype)
