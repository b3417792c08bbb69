"""Attention, rotation and norms in Triton against their twins: on a GPU, or interpreted on the CPU
(TRITON_INTERPRET=1)."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from fakes.paged_step import PagedStep, make_step, paged_reference
from fakes.triton_interpreter import repair
from hotrack.kernels.base import Ops
from hotrack.kernels.cuda_ops.ops import CudaOps
from hotrack.kernels.paged import HeadShape
from hotrack.kernels.reference import attention as plain
from hotrack.kernels.reference.norm import NormKernel, rms_norm
from hotrack.kernels.reference.rope import rope_tables
from hotrack.kernels.triton import rms_norm as norms
from hotrack.kernels.triton.attention_decode import DecodeConfig, decode_attention
from hotrack.kernels.triton.attention_prefill import PrefillConfig, prefill_attention
from hotrack.kernels.triton.ops import TritonAttention, TritonAttentionPlan
from hotrack.kernels.triton.rope_cache import rotate_and_cache

repair()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies the bits of bfloat16 matrices.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TINY_DECODE = DecodeConfig(16, 4, 2, 2)
TINY_PREFILL = PrefillConfig(16, 16, 4, 2)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[
        found.dtype
    ]  # the interpreter cuts off
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def decoded(step: PagedStep, scale: float = 0.3, **options: object) -> Tensor:
    """Into a poisoned output."""
    batch = step.batch
    assert batch.seq_lens_device is not None
    out = torch.full((len(step.q), step.q.shape[1], step.kv.v.shape[3]), float("nan")).to(step.q)
    most = max(batch.query_lens)
    return decode_attention(
        step.q, step.kv, batch.block_tables, batch.seq_lens_device, max(batch.seq_lens), scale,
        query_start=None if most == 1 else batch.query_start, max_query_len=most, out=out, config=TINY_DECODE,
        **options,
    )  # fmt: skip


def prefilled(step: PagedStep, scale: float = 0.3, **options: object) -> Tensor:
    batch = step.batch
    assert batch.seq_lens_device is not None
    assert batch.query_start is not None
    out = torch.full((len(step.q), step.q.shape[1], step.kv.v.shape[3]), float("nan")).to(step.q)
    return prefill_attention(
        step.q, step.kv, batch.block_tables, batch.query_start, batch.seq_lens_device, len(step.q), scale,
        out=out, config=TINY_PREFILL, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("splits", "lens"), [(1, [1, 16]), (8, [1]), (3, [17, 1, 130]), (1, [64, 65, 63, 32])]
)
@pytest.mark.parametrize("heads", [HeadShape(1, 1, 16), HeadShape(6, 2, 32), HeadShape(16, 1, 16)])
def test_decode(heads: HeadShape, lens: list[int], splits: int) -> None:
    step = make_step(heads, [1] * len(lens), lens, DEVICE)
    close(decoded(step, splits=splits), plain.paged_attention(step.q, step.kv, step.batch, 0.3))


@pytest.mark.parametrize(("query_lens", "seq_lens", "splits"), [([2, 1, 3], [2, 40, 33], 1), ([8], [60], 4)])
def test_decode_of_several_tokens(query_lens: list[int], seq_lens: list[int], splits: int) -> None:
    step = make_step(HeadShape(3, 1, 16), query_lens, seq_lens, DEVICE)
    close(decoded(step, splits=splits), plain.paged_attention(step.q, step.kv, step.batch, 0.3))
    close(decoded(step, splits=splits, window=9), plain.paged_attention(step.q, step.kv, step.batch, 0.3, 9))


OPTIONS = [(None, True), (7, False), (16, True), (1, False), (1000, False)]


@pytest.mark.parametrize(("window", "sinks"), OPTIONS)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_window_and_sinks(window: int | None, sinks: bool, splits: int) -> None:
    """Blocks before the window are NaN: their owner may be another sequence by now."""
    step = make_step(HeadShape(4, 1, 16), [1] * 3, [1, 16, 60], DEVICE, window=window)
    logits = random(step.q.shape[1], seed=9) if sinks else None
    found = decoded(step, splits=splits, window=window, sinks=logits)
    close(found, paged_reference(step, 0.3, window, logits))


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_of_an_empty_sequence(splits: int) -> None:
    """As a graph captured for more sequences than there are needs it."""
    step = make_step(HeadShape(4, 2, 16), [1, 1], [40, 20], DEVICE)
    assert step.batch.seq_lens_device is not None
    expected = plain.paged_attention(step.q, step.kv, step.batch, 0.3)
    step.batch.seq_lens_device[1] = 0
    found = decoded(step, splits=splits)
    close(found[:1], expected[:1])
    assert torch.equal(found[1:], torch.zeros_like(found[1:]))


def test_decode_with_a_bound_far_above_the_lengths() -> None:
    step = make_step(HeadShape(4, 1, 16), [1, 1], [33, 5], DEVICE, dtype=HALF)
    assert step.batch.seq_lens_device is not None
    found = decode_attention(
        step.q, step.kv, step.batch.block_tables, step.batch.seq_lens_device, 1 << 20, 0.3, splits=40
    )
    close(found, plain.paged_attention(step.q, step.kv, step.batch, 0.3))


@pytest.mark.parametrize("kernel", [decoded, prefilled])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(32, 16), (24, 40), (8, 8)])
def test_widths(kernel, k_dim: int, v_dim: int) -> None:
    query_lens = [1, 1, 1] if kernel is decoded else [1, 20, 7]
    step = make_step(HeadShape(4, 2, k_dim), query_lens, [33, 20, 64], DEVICE, v_dim=v_dim)
    close(kernel(step), plain.paged_attention(step.q, step.kv, step.batch, 0.3))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1], [1]), ([16], [16]), ([17, 3, 40], [17, 50, 100]), ([15, 1, 33], [64, 17, 33])],
)
@pytest.mark.parametrize("heads", [HeadShape(1, 1, 16), HeadShape(3, 1, 32)])
def test_prefill(heads: HeadShape, query_lens: list[int], seq_lens: list[int]) -> None:
    step = make_step(heads, query_lens, seq_lens, DEVICE)
    close(prefilled(step), plain.paged_attention(step.q, step.kv, step.batch, 0.3))


@pytest.mark.parametrize(("window", "sinks"), OPTIONS)
def test_prefill_window_and_sinks(window: int | None, sinks: bool) -> None:
    step = make_step(HeadShape(2, 1, 16), [18, 5, 35], [18, 40, 60], DEVICE, window=window)
    logits = random(step.q.shape[1], seed=9) if sinks else None
    close(prefilled(step, window=window, sinks=logits), paged_reference(step, 0.3, window, logits))


@pytest.mark.parametrize("kernel", [decoded, prefilled])
def test_half_precision(kernel) -> None:
    step = make_step(
        HeadShape(8, 2, 32), [1, 1] if kernel is decoded else [9, 30], [70, 30], DEVICE, dtype=HALF
    )
    close(kernel(step), plain.paged_attention(step.q, step.kv, step.batch, 0.3))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rotated", "v_dim"),
    [(HeadShape(4, 2, 32), 32, 32), (HeadShape(9, 3, 24), 16, 24), (HeadShape(7, 1, 16), 16, 8)],
)
def test_rotate_and_cache(
    heads: HeadShape, rotated: int, v_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    mine, twin = (make_step(heads, [1, 5], [20, 37], DEVICE, dtype=dtype, v_dim=v_dim) for _ in range(2))
    qkv = random(6, (H + K) * d + K * v_dim, seed=3, dtype=dtype)
    weights = (1 + 0.3 * random(d, seed=4), 1 + 0.3 * random(d, seed=5)) if normed else None
    frequency = 0.3 ** torch.arange(rotated // 2, device=DEVICE)
    cos, sin = rope_tables(torch.arange(6, device=DEVICE) * 7, frequency, 1.0, torch.float32)
    turned = qkv[:, : (H + K) * d].float().view(6, H + K, d).clone()
    if weights is not None:
        turned[:, :H], turned[:, H:] = (
            rms_norm(part, weight, 1e-6)
            for part, weight in zip(turned.split([H, K], 1), weights, strict=True)
        )
    part = turned[..., :rotated]
    turned[..., :rotated] = part * cos + torch.roll(part, rotated // 2, -1) * sin
    new = torch.cat((turned[:, H:].reshape(6, -1), qkv[:, (H + K) * d :].float()), 1).to(dtype)
    slots = mine.batch.slot_mapping.clone()
    slots[2] = -1
    kept = torch.arange(6, device=DEVICE) != 2
    plain.write_kv(new[kept], twin.kv, slots[kept])
    rotate_and_cache(qkv, heads, cos, sin, mine.kv, slots, weights, 1e-6)
    close(qkv[:, : H * d], turned[:, :H].reshape(6, -1).to(dtype))
    close(mine.kv.k.nan_to_num(9.0), twin.kv.k.nan_to_num(9.0))
    assert torch.equal(mine.kv.v.nan_to_num(9.0), twin.kv.v.nan_to_num(9.0))


@pytest.mark.parametrize("shape", [(1, 8), (3, 2, 96), (5, 2050)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = (random(*s, seed=i, dtype=dtype) for i, s in enumerate((shape, shape, shape[-1:])))
    close(norms.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
    found, total = norms.add_rms_norm(x, residual, weight, 1e-6)
    close(total, x + residual)
    close(found, rms_norm(x + residual, weight, 1e-6))
    assert norms.rms_norm(x[:0], weight, 1e-6).shape == x[:0].shape
    apart = random(4, 2 * shape[-1], seed=3, dtype=dtype)[:, : shape[-1]]
    close(norms.rms_norm(apart, weight, 1e-6), rms_norm(apart, weight, 1e-6))


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [40, 3]), ([1, 12], [40, 30]), ([12], [12])])
def test_operations_of_a_step(query_lens: list[int], seq_lens: list[int]) -> None:
    heads, tokens = HeadShape(4, 2, 32), sum(query_lens)
    weights = tuple(NormKernel(1 + 0.3 * random(32, seed=s), 1e-6) for s in (4, 5))
    cos, sin = rope_tables(torch.arange(tokens, device=DEVICE), random(16).abs(), 1.0, torch.float32)
    results = []
    for ops in (Ops(), TritonAttention()):
        step = make_step(heads, query_lens, seq_lens, DEVICE)
        qkv = random(tokens, 8 * 32, seed=3)
        plan = ops.plan_attention(step.batch, heads, torch.float32)
        ops.norm_rotate_and_cache(qkv, heads, weights, cos, sin, step.kv, plan)
        results.append(ops.paged_attention(qkv.view(-1, 8, 32)[:, :4], step.kv, plan, 0.2))
    close(results[1], results[0])


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [40, 3]), ([1, 12], [40, 30])])
@pytest.mark.parametrize("window", [None, 11])
def test_operations_of_a_windowed_step(
    query_lens: list[int], seq_lens: list[int], window: int | None
) -> None:
    """Keys and values of two widths, a head rotated in part, a window from the batch, sinks."""
    heads, tokens, sinks = HeadShape(4, 2, 48, 32), sum(query_lens), random(4, seed=8)
    cos, sin = rope_tables(torch.arange(tokens, device=DEVICE), random(8).abs(), 1.0, torch.float32)
    results = []
    for ops in (Ops(), TritonAttention()):
        step = make_step(heads, query_lens, seq_lens, DEVICE, v_dim=32, window=window)
        batch = replace(step.batch, window=window)
        qkv = random(tokens, 6 * 48 + 2 * 32, seed=3)
        plan = ops.plan_attention(batch, heads, torch.float32)
        ops.norm_rotate_and_cache(qkv, heads, None, cos, sin, step.kv, plan)
        q = qkv[:, : 4 * 48].view(-1, 4, 48)
        results.append(ops.sink_attention(q, step.kv, plan, 0.2, sinks))
        close(results[-1], paged_reference(replace(step, q=q), 0.2, window, sinks))
        results.append(ops.paged_attention(q, step.kv, plan, 0.2))
    close(results[2], results[0])
    close(results[3], results[1])
    assert (results[1] - results[0]).abs().max() > 1e-2


@pytest.mark.parametrize("width", [16, 1024])
def test_mixed_into_others(width: int) -> None:
    """What the kernels do not take is left to the next class."""

    class Mixed(TritonAttention, CudaOps):
        pass

    heads, ops = HeadShape(2, 1, width), Mixed()
    cos, sin = rope_tables(torch.arange(2, device=DEVICE), random(width // 2).abs(), 1.0, torch.float32)
    results = []
    for each in (Ops(), ops):
        step = make_step(heads, [1, 1], [20, 17], DEVICE)
        qkv = random(2, 4 * width, seed=3)
        plan = each.plan_attention(step.batch, heads, torch.float32)
        assert isinstance(plan, TritonAttentionPlan) == (each is ops and width == 16)
        each.norm_rotate_and_cache(qkv.clone(), heads, None, cos, sin, step.kv, plan)
        each.rotate_and_cache(qkv, heads, cos, sin, step.kv, plan)
        results.append(each.paged_attention(qkv.view(-1, 4, width)[:, :2], step.kv, plan, 0.02))
    close(results[1], results[0])
