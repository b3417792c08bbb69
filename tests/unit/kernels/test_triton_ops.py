"""The Triton kernels against their twins: on a GPU, or interpreted on the CPU (TRITON_INTERPRET=1)."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from hotrack.kernels.cuda_ops.attention import CudaAttentionPlan
from hotrack.kernels.cuda_ops.ops import CudaOps
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference import attention as plain
from hotrack.kernels.reference.norm import NormKernel
from hotrack.kernels.triton.ops import TritonAttentionPlan
from hotrack.kernels.triton_ops.ops import TritonOps
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16]
# The interpreter multiplies the bits of bfloat16 matrices.
PRODUCT_DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[found.dtype]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def a_step(heads: HeadShape, query_lens: list[int], seq_lens: list[int], dtype: torch.dtype, layers: int = 3):
    """The last of ``layers`` in a cache whose unwritten places are NaN, and a step over scattered blocks."""
    spec = Paged(heads.num_kv_heads, heads.head_dim, heads.head_dim, dtype.itemsize)
    (group,) = group_layers([spec] * layers, BLOCK)
    num_blocks = 2 + sum(-(-n // BLOCK) for n in seq_lens)
    storage = torch.full((num_blocks, group.row_bytes // dtype.itemsize), float("nan"), dtype=dtype)
    kv = KVTensors([group], [storage.to(DEVICE).view(torch.uint8)], dtype).layers[layers - 1]
    free = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1))).tolist()
    tables, slots = torch.zeros(len(seq_lens), -(-max(seq_lens) // BLOCK), dtype=torch.int32), []
    for row, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(-(-total // BLOCK))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        places = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(total)]
        slots += places[total - new :]
        width = 2 * heads.num_kv_heads * heads.head_dim
        plain.write_kv(random(total, width, seed=row, dtype=dtype), kv, torch.tensor(places, device=DEVICE))
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    return kv, PagedBatch(
        tables.to(DEVICE), torch.tensor(slots, device=DEVICE), query_lens, seq_lens, decodes, BLOCK,
        group.row_bytes // dtype.itemsize, starts.to(DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads", [HeadShape(4, 2, 32), HeadShape(9, 3, 8), HeadShape(7, 1, 16)])
def test_norm_rotate_and_cache(heads: HeadShape, normed: bool, dtype: torch.dtype) -> None:
    H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    tokens = 6
    qkv = random(tokens, (H + 2 * K) * d, seed=3, dtype=dtype)
    norms = None
    if normed:
        norms = tuple(NormKernel(1 + 0.3 * random(d, seed=s, dtype=dtype), 1e-6) for s in (4, 5))
    frequency = 0.3 ** torch.arange(d // 2, device=DEVICE)
    cos, sin = CudaOps().rope_tables(torch.arange(tokens, device=DEVICE) * 7, frequency, 1.0, dtype)
    results: list[tuple[Tensor, LayerKV]] = []
    for ops in (CudaOps(), TritonOps()):
        kv, batch = a_step(heads, [1, 5], [20, 37], dtype)
        mine = qkv.clone()
        ops.norm_rotate_and_cache(mine, heads, norms, cos, sin, kv, ops.plan_attention(batch, heads, dtype))
        results.append((mine[:, : H * d], kv))
    (q, kv), (fused_q, fused_kv) = results
    close(fused_q, q)
    close(fused_kv.k.nan_to_num(9.0), kv.k.nan_to_num(9.0))
    assert torch.equal(fused_kv.v.nan_to_num(9.0), kv.v.nan_to_num(9.0))


STEPS = [
    ([1], [1]),
    ([1], [64]),
    ([1, 1, 1], [65, 3, 200]),
    ([1, 1, 4], [130, 17, 40]),
    ([5, 3], [5, 70]),
]


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
@pytest.mark.parametrize("heads", [HeadShape(8, 1, 16), HeadShape(6, 2, 32)])
def test_paged_attention(
    heads: HeadShape,
    query_lens: list[int],
    seq_lens: list[int],
    dtype: torch.dtype,
) -> None:
    kv, batch = a_step(heads, query_lens, seq_lens, dtype)
    plan = TritonOps().plan_attention(batch, heads, dtype)
    if max(query_lens) > 1:
        assert isinstance(plan, CudaAttentionPlan)
        assert plan.num_elsewhere == batch.num_decodes
    else:
        assert isinstance(plan, TritonAttentionPlan)
    packed = random(sum(query_lens), heads.num_heads + 2, heads.head_dim, seed=3, dtype=dtype)
    q = packed[:, : heads.num_heads]
    close(TritonOps().paged_attention(q, kv, plan, 0.3), plain.paged_attention(q, kv, batch, 0.3))


def test_odd_widths_fall_back() -> None:
    heads = HeadShape(2, 1, 24)
    kv, batch = a_step(heads, [1, 3], [20, 9], torch.float32)
    plan = TritonOps().plan_attention(batch, heads, torch.float32)
    q = random(4, 2, 24, seed=3)
    close(TritonOps().paged_attention(q, kv, plan, 0.3), plain.paged_attention(q, kv, batch, 0.3))
