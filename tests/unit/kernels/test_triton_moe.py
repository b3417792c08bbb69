"""The MoE, linear and sampling kernels against their twins, on a GPU or interpreted."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from fakes.triton_interpreter import repair
from hotrack.kernels.reference import moe as reference
from hotrack.kernels.reference.linear import silu_and_mul as plain_silu
from hotrack.kernels.triton import moe_grouped, moe_routing
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

    for module in (moe_routing, moe_grouped):
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
    [(1, 1, 1, 16), (1, 8, 128, 16), (7, 3, 5, 16), (64, 8, 128, 16), (40, 2, 3, 64), (1100, 2, 9, 128),
     (33, 4, 512, 32)],
)  # fmt: skip
def test_choices_by_expert(T: int, k: int, E: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(T)
    slots = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(T)]).to(DEVICE)
    check_sorted(slots, E, block_m)
    check_sorted(slots.int(), E, block_m)


@pytest.mark.parametrize("T", [17, 2100])
def test_all_choices_on_one_expert(T: int) -> None:
    check_sorted(torch.full((T, 1), 2, device=DEVICE), 4, 16)


@pytest.mark.parametrize("T", [1, 2, 3, 20])
@pytest.mark.parametrize(("D", "I", "k"), [(32, 16, 1), (160, 48, 3), (36, 20, 2)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_experts(T: int, D: int, I: int, k: int, with_residual: bool) -> None:  # noqa: E741
    E = 6
    x, gate_up, down = random(T, D), random(E, 2 * I, D, seed=1) / 8, random(E, D, I, seed=2) / 8
    # Experts 0 and 5 get no token.
    slots = torch.stack(
        [torch.randperm(4, generator=torch.Generator().manual_seed(t))[:k] + 1 for t in range(T)]
    )
    weights = random(T, k, seed=3).softmax(-1)
    residual = random(T, D, seed=4) if with_residual else None
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


def test_silu_and_mul() -> None:
    x = random(3, 140)[:, :134]
    torch.testing.assert_close(silu_and_mul(x), plain_silu(x))
