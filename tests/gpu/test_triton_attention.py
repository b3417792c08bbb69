"""The Triton attention kernels at real sizes against float64, in captured graphs, and twice the same."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fakes.paged_step import PagedStep, make_step, paged_reference
from hotrack.kernels.paged import HeadShape
from hotrack.kernels.reference.norm import rms_norm as plain_rms_norm
from hotrack.kernels.triton.attention_decode import decode_attention
from hotrack.kernels.triton.attention_prefill import prefill_attention
from hotrack.kernels.triton.ops import TritonAttention
from hotrack.kernels.triton.rms_norm import add_rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # "a prototype feature" of torch's
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
LIMIT = 6e-3  # bf16: 8 bits, and the weights are rounded once more
SHAPES = [HeadShape(32, 4, 128), HeadShape(14, 2, 64), HeadShape(8, 8, 256), HeadShape(5, 1, 80)]
OPTIONS = [(None, False), (128, True)]


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference by the norm of what is expected; infinite for NaN."""
    gap = ((found.double() - expected).norm() / expected.norm()).item()
    return gap if gap == gap else float("inf")


def poisoned(step: PagedStep) -> Tensor:
    shape = len(step.q), step.q.shape[1], step.kv.v.shape[3]
    return torch.full(shape, float("nan"), dtype=BF16, device=gpu())


def decode(step: PagedStep, bound: int | None = None, **options: object) -> Tensor:
    batch = step.batch
    assert batch.seq_lens_device is not None
    most = max(batch.query_lens)
    return decode_attention(
        step.q, step.kv, batch.block_tables, batch.seq_lens_device, bound or max(batch.seq_lens), 0.1,
        query_start=None if most == 1 else batch.query_start, max_query_len=most,
        out=poisoned(step), **options,
    )  # fmt: skip


def prefill(step: PagedStep, **options: object) -> Tensor:
    batch = step.batch
    assert batch.seq_lens_device is not None
    assert batch.query_start is not None
    return prefill_attention(
        step.q, step.kv, batch.block_tables, batch.query_start, batch.seq_lens_device, len(step.q), 0.1,
        out=poisoned(step), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("window", "sinks"), OPTIONS)
@pytest.mark.parametrize("lens", [[1], [8191], [1, 16, 17, 1000, 2049, 4096, 63, 64] * 4])
@pytest.mark.parametrize("heads", SHAPES)
def test_decode(heads: HeadShape, lens: list[int], window: int | None, sinks: bool) -> None:
    step = make_step(heads, [1] * len(lens), lens, gpu(), dtype=BF16, window=window, layers=4)
    logits = torch.randn(heads.num_heads, device=gpu(), dtype=BF16) if sinks else None
    expected = paged_reference(step, 0.1, window, logits)
    for bound in (None, 1 << 16):
        found = decode(step, bound, window=window, sinks=logits)
        assert relative(found, expected) < LIMIT
        assert torch.equal(found, decode(step, bound, window=window, sinks=logits))


@pytest.mark.parametrize("query_lens", [[2, 1, 4, 3], [8, 8]])
def test_decode_of_several_tokens(query_lens: list[int]) -> None:
    step = make_step(SHAPES[0], query_lens, [3000, 20, 4, 1025][: len(query_lens)], gpu(), dtype=BF16)
    assert relative(decode(step), paged_reference(step, 0.1)) < LIMIT


@pytest.mark.parametrize("kernel", [decode, prefill])
def test_keys_wider_than_values(kernel) -> None:
    step = make_step(HeadShape(16, 2, 192), [1, 1] if kernel is decode else [100, 300], [700, 300], gpu(),
                     dtype=BF16, v_dim=128)  # fmt: skip
    assert relative(kernel(step), paged_reference(step, 0.1)) < LIMIT


@pytest.mark.parametrize(("window", "sinks"), OPTIONS)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1024], [1024]), ([777, 1, 130, 512], [777, 900, 2000, 513]), ([2048], [4096]), ([1], [1])],
)
@pytest.mark.parametrize("heads", SHAPES)
def test_prefill(
    heads: HeadShape, query_lens: list[int], seq_lens: list[int], window: int | None, sinks: bool
) -> None:
    step = make_step(heads, query_lens, seq_lens, gpu(), dtype=BF16, window=window)
    logits = torch.randn(heads.num_heads, device=gpu(), dtype=BF16) if sinks else None
    found = prefill(step, window=window, sinks=logits)
    assert relative(found, paged_reference(step, 0.1, window, logits)) < LIMIT
    assert torch.equal(found, prefill(step, window=window, sinks=logits))


def test_a_graph_serves_other_lengths() -> None:
    """Captured with the longest lengths, replayed with shorter ones and an empty sequence."""
    step = make_step(SHAPES[0], [1] * 4, [2000, 3000, 17, 1000], gpu(), dtype=BF16)
    batch, out = step.batch, poisoned(step)
    assert batch.seq_lens_device is not None

    def run() -> None:
        decode_attention(
            step.q, step.kv, batch.block_tables, batch.seq_lens_device, 3008, 0.1, out=out
        )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lens in ([2000, 3000, 17, 1000], [1, 2999, 16, 64], [700, 1, 0, 1000]):
        batch.seq_lens_device.copy_(torch.tensor(lens))
        out.fill_(float("nan"))
        graph.replay()
        kept = [i for i, n in enumerate(lens) if n]
        for row in kept:
            alone = PagedStep(
                step.q[row : row + 1],
                step.kv,
                type(batch)(
                    batch.block_tables[row : row + 1], batch.slot_mapping, [1], [lens[row]], 1,
                    batch.block_size, batch.block_stride,
                ),
            )  # fmt: skip
            assert relative(out[row : row + 1], paged_reference(alone, 0.1)) < LIMIT
        for row in set(range(4)) - set(kept):
            assert not out[row].any()


@pytest.mark.parametrize("query_lens", [[1, 1, 500], [1] * 32])
def test_no_step_waits_for_the_device(query_lens: list[int]) -> None:
    heads, tokens = SHAPES[0], sum(query_lens)
    step = make_step(heads, query_lens, [600] * len(query_lens), gpu(), dtype=BF16)
    qkv = torch.randn(tokens, 40 * 128, device=gpu(), dtype=BF16)
    cos = torch.rand(tokens, 1, 128, device=gpu(), dtype=BF16)
    ops = TritonAttention()
    weight = torch.ones(128, device=gpu(), dtype=BF16)

    def run() -> Tensor:
        norms = (ops.rms_norm(weight, 1e-6), ops.rms_norm(weight, 1e-6))
        plan = ops.plan_attention(step.batch, heads, BF16)
        ops.norm_rotate_and_cache(qkv.clone(), heads, norms, cos, cos, step.kv, plan)
        return ops.paged_attention(qkv.view(-1, 40, 128)[:, :32], step.kv, plan, 0.1)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 300])
def test_add_rms_norm(rows: int) -> None:
    x, residual = (torch.randn(rows, 2048, device=gpu(), dtype=BF16) for _ in range(2))
    weight = torch.randn(2048, device=gpu(), dtype=BF16)
    found, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert relative(found, plain_rms_norm((x + residual).double(), weight, 1e-6)) < LIMIT
