"""The gated delta rule and its convolution: any chunks, against a loop over tokens in float64."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fakes.state_step import state_plan
from hotrack.kernels.reference.causal_conv import causal_conv1d
from hotrack.kernels.reference.gated_delta import gated_delta_rule

HK, HV, DK, DV, CHANNELS, KERNEL = 2, 4, 16, 12, 10, 4
NAN = float("nan")


@dataclass
class Sequence:
    """Inputs of one sequence of n tokens; ``done`` of them are computed, the state is in row ``row``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    x: Tensor
    row: int
    done: int = 0

    def part(self, name: str, n: int) -> Tensor:
        return getattr(self, name)[self.done : self.done + n]


def sequence(n: int, row: int, seed: int = 0, decay: float = 1.0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator)

    g = -decay * randn(HV).abs()
    return Sequence(randn(HK, DK), randn(HK, DK), randn(HV, DV), g, randn(HV).sigmoid(), randn(CHANNELS), row)


def rule_by_token(s: Sequence) -> Tensor:
    q, k = (F.normalize(x.double(), dim=-1).repeat_interleave(HV // HK, 1) for x in (s.q, s.k))
    state, out = torch.zeros(HV, DK, DV, dtype=torch.float64), []
    for t in range(len(q)):
        state = state * s.g[t].double().exp()[:, None, None]
        answer = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], s.beta[t].double()[:, None] * (s.v[t] - answer))
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * DK**-0.5)
    return torch.stack(out)


def conv_by_token(s: Sequence, weight: Tensor) -> Tensor:
    padded = F.pad(s.x.double().T[None], (KERNEL - 1, 0))
    return F.silu(F.conv1d(padded, weight.double()[:, None], groups=CHANNELS))[0].T


class Runner:
    """States start as NaN: what nobody wrote must not be read."""

    def __init__(self) -> None:
        self.states = torch.full((8, HV, DK, DV), NAN)
        self.inputs = torch.full((8, KERNEL - 1, CHANNELS), NAN)
        self.weight = torch.randn(CHANNELS, KERNEL, generator=torch.Generator().manual_seed(9))

    def step(self, work: list[tuple[Sequence, int]]) -> list[tuple[Tensor, Tensor]]:
        """(sequence, its new tokens) -> (out of the rule, out of the convolution) of each."""
        lens = [n for _, n in work]
        plan = state_plan([s.row for s, _ in work], lens, [s.done == 0 for s, _ in work])
        q, k, v, g, beta, x = (
            torch.cat([s.part(name, n) for s, n in work]) for name in ("q", "k", "v", "g", "beta", "x")
        )
        rule = gated_delta_rule(q, k, v, g, beta, self.states, plan)
        conv = causal_conv1d(x, self.weight, self.inputs, plan)
        for s, n in work:
            s.done += n
        return list(zip(rule.split(lens), conv.split(lens), strict=True))


def check(s: Sequence, runner: Runner, rule: Tensor, conv: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(
        rule.double(), rule_by_token(s)[s.done - len(rule) : s.done], atol=tolerance, rtol=0
    )
    expected = conv_by_token(s, runner.weight)[s.done - len(conv) : s.done]
    torch.testing.assert_close(conv.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 63, 64, 65, 150])
def test_any_split_of_a_prompt_is_the_plain_loop(chunk: int) -> None:
    runner, s = Runner(), sequence(150, row=3)
    while s.done < 150:
        ((rule, conv),) = runner.step([(s, min(chunk, 150 - s.done))])
        check(s, runner, rule, conv)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0])
def test_any_decay(decay: float) -> None:
    """None, hardly any, and one whose inverse would overflow within a chunk."""
    runner, s = Runner(), sequence(140, row=0, decay=decay)
    ((rule, conv),) = runner.step([(s, 130)])
    check(s, runner, rule, conv, 1e-5)
    for _ in range(10):
        ((rule, conv),) = runner.step([(s, 1)])
        check(s, runner, rule, conv, 1e-5)


def test_decodes_fresh_prompts_and_chunks_share_steps() -> None:
    runner = Runner()
    a, b, c, d, e = (
        sequence(n, row, seed) for seed, (n, row) in enumerate([(9, 6), (80, 1), (200, 2), (130, 4), (70, 0)])
    )
    schedule = [
        [(a, 1), (b, 65), (c, 3), (d, 129)],
        [(d, 1), (a, 1), (b, 2), (c, 140)],
        [(a, 1), (b, 1), (c, 57), (e, 66)],
        [(a, 1), (b, 1), (e, 2)],
        [(e, 1), (a, 1), (b, 1)],
    ]
    for work in schedule:
        for (s, _), (rule, conv) in zip(work, runner.step(work), strict=True):
            check(s, runner, rule, conv)
    used = {s.row for s in (a, b, c, d, e)}
    assert all(runner.states[row].isnan().all() for row in set(range(8)) - used)


def test_the_state_goes_where_the_plan_says() -> None:
    """A sequence may read one row and write another: what it read stays as a snapshot."""
    runner, s = Runner(), sequence(40, row=1)
    runner.step([(s, 32)])
    snapshot = runner.states[1].clone()
    plan = state_plan([1], [8], [False])
    plan.write = torch.tensor([5])
    inputs = (s.part(name, 8) for name in ("q", "k", "v", "g", "beta"))
    out = gated_delta_rule(*inputs, runner.states, plan)
    torch.testing.assert_close(out.double(), rule_by_token(s)[32:], atol=2e-6, rtol=0)
    assert torch.equal(runner.states[1], snapshot)
    assert not runner.states[5].isnan().any()


def test_a_second_prompt_in_the_same_row_knows_nothing_of_the_first() -> None:
    runner, first, second = Runner(), sequence(30, row=2), sequence(30, row=2, seed=5)
    runner.step([(first, 30)])
    ((rule, conv),) = runner.step([(second, 30)])
    check(second, runner, rule, conv)
