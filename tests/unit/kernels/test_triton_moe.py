"""The MoE, linear and sampling kernels against their twins, on a GPU or interpreted."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from fakes.triton_interpreter import repair
from hotrack.core.sampling import SamplingParams
from hotrack.engine.sampler import Sampler
from hotrack.engine.sampling_batch import SamplingState
from hotrack.kernels.reference import moe as reference
from hotrack.kernels.reference.linear import silu_and_mul as plain_silu
from hotrack.kernels.triton import gemv, moe_grouped, moe_routing, sampling
from hotrack.kernels.triton.moe_grouped import Tile
from hotrack.kernels.triton.silu import silu_and_mul

repair()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance, error


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh buffers hold garbage: what a kernel does not write shows."""

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(
            shape, torch.nan if dtype.is_floating_point else 1 << 20, dtype=dtype, device=device
        )

    if DEVICE == "cpu":  # several blocks in a small vocabulary
        monkeypatch.setattr(sampling, "_BLOCK", 512)
        monkeypatch.setattr(sampling, "_PART", 1024)
    for module in (moe_routing, moe_grouped, gemv, sampling):
        monkeypatch.setattr(module.torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(*x.shape, dtype=x.dtype, device=x.device))


@pytest.mark.parametrize(("T", "E", "k"), [(1, 8, 1), (5, 128, 8), (3, 60, 4), (600, 8, 2), (2, 512, 10)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_topk(T: int, E: int, k: int, renormalize: bool) -> None:
    logits = random(T, E + 3, seed=T)[:, :E]  # rows apart
    ids, weights = moe_routing.softmax_topk(logits, k, renormalize)
    expected_ids, expected = reference.softmax_topk(logits, k, renormalize)
    assert ids.dtype == torch.int32
    torch.testing.assert_close(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_equal_logits_choose_the_lower_expert() -> None:
    ids, weights = moe_routing.softmax_topk(torch.zeros(2, 6, device=DEVICE), 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, device=DEVICE))


def check_sorted(slots: Tensor, num_experts: int, block_m: int) -> None:
    found = moe_routing.sort_choices(slots, num_experts, block_m)
    flat = slots.flatten().tolist()
    expected, experts = [], []
    for expert in range(num_experts):
        mine = [i for i, slot in enumerate(flat) if slot == expert]
        mine += [len(flat)] * (-len(mine) % block_m)
        expected += mine
        experts += [expert] * (len(mine) // block_m)
    assert found.num_blocks.tolist() == [len(experts)]
    assert len(experts) <= found.max_blocks
    assert found.block_expert[: len(experts)].tolist() == experts
    assert found.order[: len(expected)].tolist() == expected


@pytest.mark.parametrize(
    ("T", "k", "E", "block_m"),
    [(1, 1, 1, 16), (1, 8, 40, 16), (7, 3, 5, 16), (64, 8, 24, 16), (40, 2, 3, 64), (2100, 2, 9, 128),
     (33, 4, 64, 32)],
)  # fmt: skip
def test_choices_by_expert(T: int, k: int, E: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(T)
    slots = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(T)]).to(DEVICE)
    check_sorted(slots if T % 2 else slots.int(), E, block_m)


@pytest.mark.parametrize("T", [17, 2100])
def test_all_choices_on_one_expert(T: int) -> None:
    check_sorted(torch.full((T, 1), 2, device=DEVICE), 4, 16)


@pytest.mark.parametrize("T", [1, 2, 3, 20])
@pytest.mark.parametrize(("D", "I", "k"), [(32, 16, 1), (160, 48, 3), (36, 20, 2)])
def test_experts(T: int, D: int, I: int, k: int) -> None:  # noqa: E741
    E = 6
    x, gate_up, down = random(T, D), random(E, 2 * I, D, seed=1) / 8, random(E, D, I, seed=2) / 8
    # Experts 0 and 5 get no token.
    slots = torch.stack(
        [torch.randperm(4, generator=torch.Generator().manual_seed(t))[:k] + 1 for t in range(T)]
    )
    weights = random(T, k, seed=3).softmax(-1)
    residual = random(T, D, seed=4) if T % 2 else None
    gate_up[0] = gate_up[5] = down[0] = down[5] = torch.nan
    expected = reference.moe_experts(x, gate_up, down, slots.to(DEVICE), weights)
    found = moe_grouped.moe_experts(x, gate_up, down, slots.to(DEVICE), weights, residual)
    close(found, expected if residual is None else expected + residual)


@pytest.mark.parametrize("block_m", [32, 64, 128])
def test_blocks_of_long_prompts(block_m: int) -> None:
    T, D, I, E, k = 70, 96, 40, 3, 2  # noqa: E741
    dtype = (
        torch.bfloat16 if DEVICE == "cuda" else torch.float16
    )  # the interpreter multiplies bfloat16's bits
    x = random(T, D, dtype=dtype)
    gate_up, down = (random(E, n, m, seed=n).div(8).to(dtype) for n, m in ((2 * I, D), (D, I)))
    slots = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)])
    weights = random(T, k, seed=3).softmax(-1)
    choices = moe_routing.sort_choices(slots.to(DEVICE), E, block_m)
    tiles = Tile(32, 32, 4, 2), Tile(64, 16, 4, 2)
    y = moe_grouped.experts_blocks(x, gate_up, down, choices, k, tiles)
    found = moe_grouped.combine(y, weights)
    close(
        found,
        reference.moe_experts(x.float(), gate_up.float(), down.float(), slots.to(DEVICE), weights),
        2e-2,
    )


def test_both_ways_agree() -> None:
    x, gate_up, down = random(2, 64), random(4, 64, 64, seed=1) / 8, random(4, 64, 32, seed=2) / 8
    slots, weights = torch.tensor([[3, 1], [1, 0]], device=DEVICE), torch.rand(2, 2).to(DEVICE)
    direct = moe_grouped.experts_direct(x, gate_up, down, slots, weights)
    tiles = Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)
    choices = moe_routing.sort_choices(slots, 4, 16)
    y = moe_grouped.experts_blocks(x, gate_up, down, choices, 2, tiles)
    close(moe_grouped.combine(y, weights), direct)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float8 weight [E, N, K], its scales by 128 x 128, and what both stand for."""
    blocks = weight.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scale = blocks.abs().amax((2, 4)) / 448
    narrow = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
    wide = (narrow.float() * scale[:, :, None, :, None]).flatten(3).flatten(1, 2)
    return narrow.flatten(3).flatten(1, 2), scale, wide


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="no float8")
@pytest.mark.parametrize("T", [1, 5])
def test_experts_in_float8(T: int) -> None:
    D, I, E, k = 256, 128, 3, 2  # noqa: E741
    x, weights = random(T, D), random(T, k, seed=3).softmax(-1)
    gate_up, down = quantized(random(E, 2 * I, D, seed=1) / 16), quantized(random(E, D, I, seed=2) / 12)
    slots = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)])
    slots = slots.to(DEVICE)
    found = moe_grouped.moe_experts(x, gate_up[0], down[0], slots, weights, scales=(gate_up[1], down[1]))
    close(found, reference.moe_experts(x, gate_up[2], down[2], slots, weights))


def test_silu_and_mul() -> None:
    x = random(3, 140)[:, :134]
    torch.testing.assert_close(silu_and_mul(x), plain_silu(x))


@pytest.mark.parametrize("M", [1, 2, 8, 16])
@pytest.mark.parametrize(("N", "K"), [(48, 256), (37, 132), (1, 16), (600, 96)])
@pytest.mark.parametrize("extras", [False, True])
def test_linear_of_few_rows(M: int, N: int, K: int, extras: bool) -> None:
    x, weight = random(M, K + 4)[:, :K], random(N, K, seed=1)
    bias, residual = (random(N, seed=2), random(M, N, seed=3)) if extras else (None, None)
    expected = torch.nn.functional.linear(x.double(), weight.double())
    if bias is not None and residual is not None:
        expected = expected + bias + residual
    close(gemv.linear(x, weight, bias, residual), expected)


def test_linear_to_float() -> None:
    x, weight = random(1, 256, dtype=torch.bfloat16), random(16, 256, seed=1, dtype=torch.bfloat16)
    found = gemv.linear(x, weight, dtype=torch.float32)
    assert found.dtype == torch.float32
    close(found, x.double() @ weight.double().T)


def rows_of(params: list[SamplingParams], positions: list[int]) -> sampling.SamplingRows:
    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return sampling.SamplingRows(
        column([p.temperature for p in params], torch.float32),
        column([p.top_k for p in params], torch.int32), column([p.top_p for p in params], torch.float32),
        column([p.min_p for p in params], torch.float32), column([p.seed or 0 for p in params], torch.int64),
        column(positions, torch.int64),
    )  # fmt: skip


PARAMS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1e-5},
]


@pytest.mark.parametrize("V", [300, 2301])
def test_sampled_tokens_are_those_of_the_engine(V: int) -> None:
    params = [SamplingParams(seed=row - 3, **given) for row, given in enumerate(PARAMS)]
    logits = random(len(params), V) * 3
    logits[3] = logits[3].round()  # many ties
    positions = [7 * row for row in range(len(params))]
    state = SamplingState(len(params), V, torch.device(DEVICE))
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        state.add(row, param, prompt_token_ids=[0], output_token_ids=[0] * position)
    expected = Sampler()(logits, state.select(range(len(params)))).tokens
    tokens, logprobs = sampling.sample(logits, rows_of(params, positions))
    assert tokens.tolist() == expected.tolist()
    found = logits.log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, found, atol=1e-4, rtol=1e-5)


def test_rows_that_cannot_be_sampled() -> None:
    logits = random(4, 50)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, seed=1)] * 4
        tokens, logprobs = sampling.sample(logits, rows_of(params, [0] * 4))
        assert tokens.tolist()[:3] == [sampling.INVALID_TOKEN] * 3
        assert logprobs.isnan().tolist() == [True, True, True, False]


def test_distribution() -> None:
    """Chi-square over many draws of one row; 5 degrees of freedom, 99.9 % under 20.5."""
    draws, logits = (
        2000 if DEVICE == "cuda" else 300,
        torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, -torch.inf], device=DEVICE),
    )
    params = [SamplingParams(seed=5)] * draws
    tokens, _ = sampling.sample(logits.expand(draws, -1), rows_of(params, list(range(draws))))
    found = torch.bincount(tokens.long(), minlength=7).double().cpu()
    expected = logits.softmax(-1).double().cpu() * draws
    assert found[6] == 0
    assert ((found - expected)[:6] ** 2 / expected[:6]).sum() < 20.5
