"""Qwen3-Next on one GPU: kernels at published sizes, the tokens of the CPU, sleep and wake."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.state_step import state_plan
from fakes.tiny_checkpoints import write_tiny
from hotrack.config.engine import EngineConfig
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.in_process import InProcessBackend
from hotrack.kernels.base import Ops
from hotrack.kernels.ops import select_ops
from hotrack.kernels.recurrent import StatePlan
from hotrack.kernels.reference import causal_conv, gated_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
HK, HV, DIM, CHANNELS, ROWS = 16, 32, 128, 8192, 12
BF16 = torch.bfloat16
STEPS = [[1], [1] * 6, [300], [64, 700], [1, 1, 90, 2000]]


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(gpu(), dtype)


def ops() -> Ops:
    return select_ops(gpu(), BF16)


def on_gpu(plan: StatePlan) -> StatePlan:
    return StatePlan(
        *(x.to(gpu()) for x in (plan.read, plan.write, plan.fresh, plan.query_start)),
        plan.query_lens,
        plan.num_decodes,
    )


def a_plan(lens: list[int]) -> StatePlan:
    """The last sequence starts here."""
    return on_gpu(
        state_plan(list(range(ROWS, ROWS - len(lens), -1)), lens, [False] * (len(lens) - 1) + [True])
    )


@pytest.mark.parametrize("lens", STEPS, ids=str)
def test_the_rule_against_float64(lens: list[int]) -> None:
    tokens = sum(lens)
    q, k, v = (randn(tokens, heads, DIM, seed=i, dtype=BF16) for i, heads in enumerate((HK, HK, HV)))
    g, beta = -randn(tokens, HV, seed=4).abs(), randn(tokens, HV, seed=5).sigmoid()
    states = randn(ROWS + 1, HV, DIM, DIM, seed=6)
    plan, before = a_plan(lens), states.clone()
    found = ops().gated_delta_rule(q, k, v, g, beta, states, plan)
    start = 0
    for index, length in enumerate(lens):
        rows = slice(start, start + length)
        start += length
        state = before[plan.read[index]].double()[None] * (not bool(plan.fresh[index]))
        outputs = []
        queries, keys = (gated_delta.unit_rows(x[rows].double()) for x in (q, k))
        for t in range(length):
            out, state = gated_delta.recurrent_step(
                queries[t][None] * DIM**-0.5, keys[t][None], v[rows][t].double()[None],
                g[rows][t].double()[None], beta[rows][t].double()[None], state,
            )  # fmt: skip
            outputs.append(out)
        expected = torch.cat(outputs)
        assert (found[rows] - expected).abs().max() <= 2e-4 * expected.abs().max()
        assert (states[plan.write[index]] - state[0]).abs().max() <= 2e-4 * state.abs().max()


@pytest.mark.parametrize("lens", STEPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_convolution_against_the_cpu(lens: list[int], dtype: torch.dtype) -> None:
    x, weight = randn(sum(lens), CHANNELS, seed=1, dtype=dtype), randn(CHANNELS, 4, seed=2, dtype=dtype)
    states, plan = randn(ROWS + 1, 3, CHANNELS, seed=3, dtype=dtype), a_plan(lens)
    mine = states.clone().cpu()
    fresh = [False] * (len(lens) - 1) + [True]
    rows = list(range(ROWS, ROWS - len(lens), -1))
    expected = causal_conv.causal_conv1d(x.cpu(), weight.cpu(), mine, state_plan(rows, lens, fresh))
    found = ops().causal_conv1d(x, weight, states, plan)
    torch.testing.assert_close(found.cpu(), expected)
    assert torch.equal(states.cpu(), mine)


def test_decodes_are_captured_with_new_rows_in_place() -> None:
    """A graph of one decode step follows the rows that are written into its plan."""
    plan = a_plan([1] * 4)
    q, k, v = (randn(4, heads, DIM, seed=i, dtype=BF16) for i, heads in enumerate((HK, HK, HV)))
    g, beta = -randn(4, HV, seed=4).abs(), randn(4, HV, seed=5).sigmoid()
    states, fused = randn(ROWS + 1, HV, DIM, DIM, seed=6), ops()
    start = states.clone()
    fused.gated_delta_rule(q, k, v, g, beta, states, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.gated_delta_rule(q, k, v, g, beta, states, plan)
    for rows in ([3, 9, 1, 2], [12, 4, 5, 6]):
        states.copy_(start)
        plan.read.copy_(torch.tensor(rows))
        plan.write.copy_(torch.tensor(rows))
        plan.fresh.copy_(torch.tensor([True, False, False, False]))
        graph.replay()
        mine = start.clone()
        fresh = on_gpu(state_plan(rows, [1] * 4, [True, False, False, False]))
        torch.testing.assert_close(out, gated_delta.gated_delta_rule(q, k, v, g, beta, mine, fresh))
        torch.testing.assert_close(states, mine)


# ---- the engine

PROMPTS = [list(range(3, 40)), [7, 8, 9], [(i * i) % 400 + 3 for i in range(200)], list(range(3, 90))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("next"), "qwen3_next")


def engine(path: Path, **options: object) -> InProcessBackend:
    defaults = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}
    return InProcessBackend(EngineConfig(model=str(path), **{**defaults, **options}))


def generate(backend: InProcessBackend, count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    requests = [EngineRequest(f"r{i}", pack_tokens(p), params, count) for i, p in enumerate(PROMPTS)]
    outputs = backend.run(requests, lambda _: False)
    for found in outputs.values():
        assert found[-1].finish_reason is not FinishReason.ERROR, found[-1].error
    return [[t for o in outputs[r.request_id] for t in unpack_tokens(o.tokens)] for r in requests]


def test_tokens_of_the_cpu_and_prefix_hits(checkpoint: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        backend = engine(checkpoint, device=device, dtype="float32", max_num_batched_tokens=64, num_threads=4)
        found[device] = generate(backend, 24)
        assert generate(backend, 24) == found[device], "with prefix hits"
        backend.close()
    assert found["cuda"] == found["cpu"]
    assert len({token for tokens in found["cpu"] for token in tokens}) > 5


@pytest.mark.parametrize("streamed", [False, True])
def test_sleep_and_wake(checkpoint: Path, streamed: bool) -> None:
    backend = engine(checkpoint, device="cuda", dtype="float32", max_num_batched_tokens=64)
    expected = generate(backend, 16)
    for level in (1, 2, 1, 1, 2):
        assert backend.control("sleep", level=level)["is_sleeping"]
        assert not backend.control("wake", streamed=streamed)["is_sleeping"]
        assert generate(backend, 16) == expected
    backend.close()


def test_no_hidden_waits(checkpoint: Path) -> None:
    backend = engine(checkpoint, device="cuda", max_num_batched_tokens=64, enable_prefix_caching=False)
    expected = generate(backend, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = generate(backend, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in expected]
    backend.close()
