"""The GPU's operations against the reference ones, on the CPU: the code is the same, only the flash and
grouped kernels under it differ."""

import pytest
import torch
from torch import Tensor

from hotrack.kernels.cuda_ops import attention, moe
from hotrack.kernels.cuda_ops.ops import CudaOps
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference import attention as plain_attention
from hotrack.kernels.reference import moe as plain_moe
from hotrack.kernels.reference import norm as plain_norm
from hotrack.kernels.reference import rope as plain_rope
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors

BLOCK = 4
HEADS = HeadShape(num_heads=6, num_kv_heads=2, head_dim=8)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def a_step(query_lens: list[int], seq_lens: list[int], num_blocks: int = 64) -> tuple[LayerKV, PagedBatch]:
    """Layer 1 of 3 in a cache full of random numbers, and a step over sequences in scattered blocks."""
    spec = Paged(HEADS.num_kv_heads, HEADS.head_dim, HEADS.head_dim, 4)
    (group,) = group_layers([spec] * 3, BLOCK)
    storage = random(num_blocks, group.row_bytes // 4).view(torch.uint8)
    kv = KVTensors([group], [storage], torch.float32)
    free = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1))).tolist()
    width = -(-max(seq_lens) // BLOCK)
    tables, slots = torch.zeros(len(seq_lens), width, dtype=torch.int32), []
    for row, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(-(-total // BLOCK))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(total - new, total)]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    return kv.layers[1], PagedBatch(
        tables, torch.tensor(slots), query_lens, seq_lens, decodes, BLOCK, group.row_bytes // 4, starts,
        torch.tensor(seq_lens, dtype=torch.int32),
    )  # fmt: skip


STEPS = [
    ([1], [1]),
    ([1], [9]),
    ([7], [7]),
    ([3], [20]),
    ([1, 1, 1], [5, 17, 4]),
    ([1, 1, 6, 3], [12, 3, 6, 30]),
]


@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
@pytest.mark.parametrize("gather_tokens", [1 << 17, 10])
def test_attention(
    query_lens: list[int], seq_lens: list[int], gather_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "GATHER_TOKENS", gather_tokens)
    monkeypatch.setattr(attention, "MASK_QUERIES", 4)
    kv, batch = a_step(query_lens, seq_lens)
    ops = CudaOps()
    plan = ops.plan_attention(batch, HEADS, torch.float32)
    assert isinstance(plan, attention.CudaAttentionPlan)
    new = random(sum(query_lens), 2 * HEADS.num_kv_heads * HEADS.head_dim, seed=2)
    ops.write_kv(new, kv, plan)
    k, v = kv.k.clone(), kv.v.clone()
    plain_attention.write_kv(new, kv, batch.slot_mapping)
    assert torch.equal(kv.k, k)
    assert torch.equal(kv.v, v)
    q = random(sum(query_lens), HEADS.num_heads, HEADS.head_dim, seed=3)
    expected = plain_attention.paged_attention(q, kv, batch, 0.4)
    torch.testing.assert_close(ops.paged_attention(q, kv, plan, 0.4), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [3, 8, 13])
def test_a_whole_prompt(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose cuDNN is asked, with lengths padded to 8."""
    monkeypatch.setattr(attention, "LONG_PROMPT", 1)
    monkeypatch.setattr(attention, "PROMPT_STEP", 8)
    monkeypatch.setattr(attention, "_has_flash", lambda q: True)
    monkeypatch.setattr(attention, "_has_fast_cudnn", lambda index: True)
    kv, batch = a_step([tokens], [tokens])
    plan = CudaOps().plan_attention(batch, HEADS, torch.float32)
    q = random(tokens, HEADS.num_heads, HEADS.head_dim, seed=3)
    expected = plain_attention.paged_attention(q, kv, batch, 0.4)
    monkeypatch.setattr(attention, "flash_varlen", None)
    torch.testing.assert_close(CudaOps().paged_attention(q, kv, plan, 0.4), expected, atol=1e-5, rtol=1e-5)


def test_only_whole_prompts_are_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG_PROMPT", 4)
    monkeypatch.setattr(attention, "_has_flash", lambda q: True)
    monkeypatch.setattr(attention, "_has_fast_cudnn", lambda index: True)
    q = random(1, HEADS.num_heads, HEADS.head_dim)
    for query_lens, seq_lens, long in (([4], [4], True), ([3], [3], False), ([5], [9], False)):
        _, batch = a_step(query_lens, seq_lens)
        plan = CudaOps().plan_attention(batch, HEADS, torch.float32)
        assert isinstance(plan, attention.CudaAttentionPlan)
        assert [attention._is_long_prompt(q, span) for span in plan.spans] == [long]


def test_decodes_are_gathered_apart_from_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GATHER_TOKENS", 16)
    _, batch = a_step([1, 1, 1, 2], [10, 6, 1, 40])
    plan = CudaOps().plan_attention(batch, HEADS, torch.float32)
    assert isinstance(plan, attention.CudaAttentionPlan)
    assert [span.key_lens for span in plan.spans] == [[10, 6], [1], [40]]
    assert [span.query_start.tolist() for span in plan.spans] == [[0, 1, 2], [0, 1], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "COMBINE_TOKENS", 16)
    experts, k, D, I = 8, 3, 32, 16  # noqa: E741
    x = random(tokens, D, dtype=dtype)
    gate_up, down = random(experts, 2 * I, D, seed=1, dtype=dtype), random(experts, D, I, seed=2, dtype=dtype)
    gate_up, down = gate_up * D**-0.5, down * I**-0.5
    ids, weights = plain_moe.softmax_topk(random(tokens, experts, seed=3), k, True)
    ids = ids % 5  # some experts get nothing
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = plain_moe.moe_experts(x, gate_up, down, ids, weights)
    found = CudaOps().routed_experts(x, gate_up, down, ids, weights)
    assert moe.can_group(gate_up, down) == (dtype == torch.bfloat16)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_experts_of_an_odd_width_take_the_loop() -> None:
    gate_up, down = random(4, 12, 32, dtype=torch.bfloat16), random(4, 32, 6, dtype=torch.bfloat16)
    assert not moe.can_group(gate_up, down)
    x, slots = random(3, 32, dtype=torch.bfloat16), torch.tensor([[0], [3], [3]])
    found = CudaOps().routed_experts(x, gate_up, down, slots, torch.ones(3, 1))
    torch.testing.assert_close(found, plain_moe.moe_experts(x, gate_up, down, slots, torch.ones(3, 1)))


def test_sorting_is_stable_and_counts() -> None:
    order, ends = moe.sort_by_expert(torch.tensor([[2, 0], [0, 2], [3, 0]]), 5)
    assert order.tolist() == [1, 2, 5, 0, 3, 4]
    assert ends.tolist() == [3, 3, 5, 6, 6]
    assert moe.inverse_of(order)[order].tolist() == list(range(6))


def test_elementwise() -> None:
    ops = CudaOps()
    x, weight = random(5, 3, 8), 1 + 0.1 * random(8, seed=1)
    torch.testing.assert_close(ops.rms_norm(weight, 1e-6)(x), plain_norm.rms_norm(x, weight, 1e-6))
    cos, sin = ops.rope_tables(torch.arange(5), torch.tensor([1.0, 0.5, 0.1, 0.01]), 1.0, torch.float32)
    rotated = x.clone()
    ops.apply_rope(rotated, cos, sin)
    torch.testing.assert_close(rotated, plain_rope.apply_rope(x, cos, sin))
    matrix, residual, bias = random(7, 8, seed=4), random(5, 7, seed=5), random(7, seed=6)
    rows = x[:, 0]
    torch.testing.assert_close(ops.linear(matrix).add(rows, residual), residual + rows @ matrix.T)
    torch.testing.assert_close(
        ops.linear(matrix, bias).add(rows, residual), residual + rows @ matrix.T + bias
    )
