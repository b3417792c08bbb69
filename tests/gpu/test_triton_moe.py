"""Experts, few-row products and sampling at the sizes of real models, against float32 on the same device."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hotrack.kernels.reference import moe as reference
from hotrack.kernels.triton import gemv, moe_grouped, moe_routing, sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")
D, I, E, K = 2048, 768, 128, 8  # noqa: E741 Qwen3-30B-A3B
TOLERANCE = 8e-3


def random(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="module")
def stacks() -> tuple[Tensor, Tensor]:
    return random(E, 2 * I, D, seed=1, scale=D**-0.5), random(E, D, I, seed=2, scale=I**-0.5)


def exact(x: Tensor, stacks: tuple[Tensor, Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """float32 throughout, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=DEVICE)
    for expert in torch.unique(ids).tolist():
        token, choice = torch.where(ids == expert)
        gate, up = (x[token].float() @ stacks[0][expert].float().T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ stacks[1][expert].float().T
        out.index_add_(0, token, y * weights[token, choice, None])
    return out


@pytest.mark.parametrize("T", [1, 2, 3, 8, 64, 129, 256, 1000, 8192])
def test_experts(T: int, stacks: tuple[Tensor, Tensor]) -> None:
    x, logits = random(T, D, seed=T), random(T, E, seed=T + 1, dtype=torch.float32)
    ids, weights = moe_routing.softmax_topk(logits, K, True)
    expected_ids, expected_weights = reference.softmax_topk(logits, K, True)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    residual = random(T, D, seed=5)
    found = moe_grouped.moe_experts(x, *stacks, ids, weights, residual)
    again = moe_grouped.moe_experts(x, *stacks, ids, weights, residual)
    assert torch.equal(found, again)  # sums have one order
    assert error(found, exact(x, stacks, ids, weights) + residual.float()) < TOLERANCE


@pytest.mark.parametrize("T", [3, 300])
def test_all_tokens_on_the_same_experts(T: int, stacks: tuple[Tensor, Tensor]) -> None:
    x, weights = random(T, D, seed=3), torch.full((T, K), 1 / K, device=DEVICE)
    ids = torch.arange(K, device=DEVICE).expand(T, K).contiguous()
    found = moe_grouped.moe_experts(x, *stacks, ids, weights)
    assert error(found, exact(x, stacks, ids, weights)) < TOLERANCE


@pytest.mark.parametrize("T", [1, 8, 64, 300])
def test_float8(T: int, stacks: tuple[Tensor, Tensor]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8")
    narrow, scales, wide = [], [], []
    for weight in stacks:
        blocks = weight.float().unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
        scale = blocks.abs().amax((2, 4)) / 448
        small = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
        wide.append((small.float() * scale[:, :, None, :, None]).view(weight.shape))
        narrow.append(small.view(weight.shape))
        scales.append(scale)
    x, ids = random(T, D, seed=T), torch.rand(T, E, device=DEVICE).topk(K).indices
    weights = torch.rand(T, K, device=DEVICE)
    found = moe_grouped.moe_experts(x, *narrow, ids, weights, scales=(scales[0], scales[1]))
    assert error(found, exact(x, (wide[0], wide[1]), ids, weights)) < TOLERANCE


def test_a_graph_replays_for_any_routing(stacks: tuple[Tensor, Tensor]) -> None:
    x, logits = random(16, D, seed=1), random(16, E, seed=2, dtype=torch.float32)

    def step() -> Tensor:
        return moe_grouped.moe_experts(x, *stacks, *moe_routing.softmax_topk(logits, K, True))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        x.copy_(random(16, D, seed=10 + seed))
        logits.copy_(random(16, E, seed=20 + seed, dtype=torch.float32))
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, step())


@pytest.mark.parametrize("M", [1, 2, 8, 16])
@pytest.mark.parametrize(("N", "width"), [(5120, 2048), (2048, 4096), (151_936, 2048), (128, 2048)])
def test_few_rows(M: int, N: int, width: int) -> None:
    x, weight = random(M, width, seed=1), random(N, width, seed=2, scale=width**-0.5)
    residual = random(M, N, seed=3)
    expected = x.double() @ weight.double().T
    assert error(gemv.linear(x, weight, dtype=torch.float32), expected) < 1e-5
    assert error(gemv.linear(x, weight, residual=residual), expected + residual) < TOLERANCE


def test_sampling_at_a_real_vocabulary() -> None:
    R, V = 64, 151_936
    logits = random(R, V, seed=1, scale=3.0, dtype=torch.float32)

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((R,), value, dtype=dtype, device=DEVICE)

    seeds = torch.arange(R, device=DEVICE)
    greedy = sampling.SamplingRows(full(0), full(0, torch.int32), full(1), full(0), seeds, seeds)
    tokens, logprobs = sampling.sample(logits, greedy)
    assert torch.equal(tokens.long(), logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), atol=1e-4, rtol=1e-5)
    narrow = sampling.SamplingRows(full(0.8), full(20, torch.int32), full(0.9), full(0), seeds, seeds)
    drawn, _ = sampling.sample(logits, narrow)
    assert torch.equal(drawn, sampling.sample(logits, narrow)[0])
    best = logits.topk(20).indices
    assert (best == drawn[:, None]).any(1).all()
    alone, _ = sampling.sample(logits[5:6], sampling.SamplingRows(
        *(getattr(narrow, name)[5:6] for name in sampling.SamplingRows.__slots__)
    ))  # fmt: skip
    assert alone.item() == drawn[5].item()  # the batch has no part in it
