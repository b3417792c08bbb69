"""Every fast CPU kernel against its reference twin."""

import pytest
import torch
from torch import Tensor

from hotrack.kernels.base import Ops
from hotrack.kernels.cpu_ops import moe
from hotrack.kernels.cpu_ops.attention import CpuAttentionPlan
from hotrack.kernels.cpu_ops.ops import CpuOps
from hotrack.kernels.ops import select_ops
from hotrack.kernels.paged import HeadShape, PagedBatch
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
REFERENCE, FAST = Ops(), CpuOps()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(fast: Tensor, slow: Tensor) -> None:
    assert fast.dtype == slow.dtype
    assert fast.shape == slow.shape
    error = (fast.float() - slow.float()).abs().max()
    assert error <= TOLERANCE[slow.dtype] * slow.float().abs().max().clamp(min=1)


def test_chosen_by_device() -> None:
    assert isinstance(select_ops(torch.device("cpu")), CpuOps)
    assert type(select_ops(torch.device("meta"))) is Ops


@DTYPES
@pytest.mark.parametrize("shape", [(1, 96), (7, 96), (400, 96), (3, 6, 32)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype) * 3 + 1, random(shape[-1], dtype=dtype, seed=1)
    kernel = FAST.rms_norm(weight, 1e-5)
    slow = REFERENCE.rms_norm(weight, 1e-5)(x)
    assert_close(kernel(x), slow)
    kernel.pack()
    assert_close(kernel(x), slow)
    assert kernel.packed_bytes() > 0
    kernel.unpack()
    assert kernel.packed_bytes() == 0


@DTYPES
@pytest.mark.parametrize("tokens", [1, 5])
def test_rope_rotates_a_view_in_place(dtype: torch.dtype, tokens: int) -> None:
    inv_freq = 1e4 ** -(torch.arange(0, 32, 2) / 32)
    cos, sin = REFERENCE.rope_tables(torch.arange(tokens) + 1000, inv_freq, 1.0, dtype)
    whole = random(tokens, 6, 32, dtype=dtype)
    fast, slow = whole.clone(), whole.clone()
    FAST.apply_rope(fast[:, :4], cos, sin)
    REFERENCE.apply_rope(slow[:, :4], cos, sin)
    assert_close(fast, slow)
    assert torch.equal(fast[:, 4:], whole[:, 4:])


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_linear_packed_and_not(dtype: torch.dtype, bias: bool, rows: int) -> None:
    x, weight = random(rows, 48, dtype=dtype), random(64, 48, dtype=dtype, seed=1)
    b = random(64, dtype=dtype, seed=2) if bias else None
    residual = random(rows, 64, dtype=dtype, seed=3)
    slow, gate_slow = REFERENCE.linear(weight, b), REFERENCE.gate_up(weight, b)
    fast, gate_fast = FAST.linear(weight, b), FAST.gate_up(weight, b)
    for _ in range(2):
        assert_close(fast(x), slow(x))
        assert_close(fast.add(x, residual), slow.add(x, residual))
        assert_close(gate_fast(x), gate_slow(x))
        fast.pack()
        gate_fast.pack()


def test_packed_linear_does_not_read_its_weight() -> None:
    x, weight = random(3, 48, dtype=torch.bfloat16), random(64, 48, dtype=torch.bfloat16, seed=1)
    kernel = FAST.linear(weight)
    assert kernel.reads_weight()
    kernel.pack()
    if kernel.reads_weight():
        pytest.skip("this CPU has no oneDNN bf16 path")
    want = kernel(x)
    weight.zero_()
    assert torch.equal(kernel(x), want)
    kernel.unpack()
    assert kernel.reads_weight()
    assert not kernel(x).any()


CASES = {
    "one decode": [(1, 37)],
    "decodes of unequal length": [(1, 37), (1, 1), (1, 130), (1, 16)],
    "many decodes": [(1, 11 + 7 * i) for i in range(9)],
    "fresh prompt": [(150, 150)],
    "chunk after a prefix": [(40, 173)],
    "one token left of a prompt": [(1, 64), (2, 2)],
    "mixed": [(1, 20), (1, 99), (129, 140), (3, 3), (16, 48)],
}


@DTYPES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [HeadShape(6, 2, 32), HeadShape(4, 4, 16)], ids=["gqa", "mha"])
def test_attention_over_pages(dtype: torch.dtype, case: str, heads: HeadShape) -> None:
    work, size, num_blocks = CASES[case], 16, 64
    (group,) = group_layers(
        [Paged(heads.num_kv_heads, heads.head_dim, heads.head_dim, dtype.itemsize)] * 3, size
    )
    storage = random(num_blocks, group.row_bytes // dtype.itemsize, dtype=dtype).view(torch.uint8)
    fast_kv = KVTensors([group], [storage.clone()], dtype).layers[1]
    slow_kv = KVTensors([group], [storage.clone()], dtype).layers[1]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    tables = torch.zeros(len(work), 12, dtype=torch.int32)
    slots, used = [], 0
    for i, (new, total) in enumerate(work):
        blocks = -(-total // size)
        tables[i, :blocks] = order[used : used + blocks]
        used += blocks
        positions = torch.arange(total - new, total)
        slots.append(tables[i, positions // size].long() * size + positions % size)
    batch = PagedBatch(
        tables, torch.cat(slots), [n for n, _ in work], [t for _, t in work],
        sum(n == 1 for n, _ in work), size, group.row_bytes // dtype.itemsize,
    )  # fmt: skip
    T = sum(batch.query_lens)
    qkv = random(T, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype, seed=2)
    q, new = qkv[:, : heads.num_heads], qkv[:, heads.num_heads :].flatten(1)
    fast_plan, slow_plan = (ops.plan_attention(batch, heads, dtype) for ops in (FAST, REFERENCE))
    assert isinstance(fast_plan, CpuAttentionPlan)
    FAST.write_kv(new, fast_kv, fast_plan)
    REFERENCE.write_kv(new, slow_kv, slow_plan)
    assert torch.equal(fast_kv.k, slow_kv.k)
    assert torch.equal(fast_kv.v, slow_kv.v)
    scale = heads.head_dim**-0.5
    assert_close(
        FAST.paged_attention(q, fast_kv, fast_plan, scale),
        REFERENCE.paged_attention(q, slow_kv, slow_plan, scale),
    )


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["sorted", "gathered"])
def test_moe_experts(dtype: torch.dtype, tokens: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "GATHER_BYTES", limit)
    x = random(tokens, 32, dtype=dtype)
    gate_up, down = random(8, 48, 32, dtype=dtype, seed=1) * 0.2, random(8, 32, 24, dtype=dtype, seed=2) * 0.2
    ids, weights = REFERENCE.softmax_topk(random(tokens, 8, seed=3), 2, True)
    fast = FAST.routed_experts(x, gate_up, down, ids, weights)
    assert_close(fast, REFERENCE.routed_experts(x, gate_up, down, ids, weights))
