"""A step over a paged cache whose unwritten places are NaN, and attention over it in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.attention import write_kv
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors

BLOCK = 16


@dataclass
class PagedStep:
    """q [T, H, d], every third of a wider row apart from the next; ``kv``: the last of three layers."""

    q: Tensor
    kv: LayerKV
    batch: PagedBatch


def make_step(
    heads: HeadShape,
    query_lens: list[int],
    seq_lens: list[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    v_dim: int | None = None,
    window: int | None = None,
    layers: int = 3,
    seed: int = 0,
) -> PagedStep:
    """Scattered blocks. With ``window``, blocks that no new token sees any more are NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    K, d, v_dim = heads.num_kv_heads, heads.head_dim, v_dim or heads.head_dim
    (group,) = group_layers([Paged(K, d, v_dim, dtype.itemsize)] * layers, BLOCK)
    blocks = [-(-n // BLOCK) for n in seq_lens]
    storage = torch.full(
        (2 + sum(blocks), group.row_bytes // dtype.itemsize), float("nan"), dtype=dtype, device=device
    )
    kv = KVTensors([group], [storage.view(torch.uint8)], dtype).layers[layers - 1]
    order = 1 + torch.randperm(1 + sum(blocks), generator=generator, device=device)
    tables = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32, device=device)
    slots, used = [], 0
    for row, (new, total, count) in enumerate(zip(query_lens, seq_lens, blocks, strict=True)):
        mine = order[used : used + count]
        used += count
        tables[row, :count] = mine.int()
        place = torch.arange(total, device=device)
        place = mine[place // BLOCK] * BLOCK + place % BLOCK
        values = torch.randn(total, K * (d + v_dim), generator=generator, device=device).to(dtype)
        write_kv(values, kv, place)
        slots.append(place[total - new :])
        if window is not None:
            storage[mine[: max(0, total - new - window + 1) // BLOCK]] = float("nan")
    tokens = sum(query_lens)
    q = torch.randn(tokens, heads.num_heads + 2, d, generator=generator, device=device).to(dtype)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    return PagedStep(
        q[:, : heads.num_heads],
        kv,
        PagedBatch(
            tables, torch.cat(slots), query_lens, seq_lens, decodes, BLOCK,
            group.row_bytes // dtype.itemsize, starts,
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
        ),
    )  # fmt: skip


def paged_reference(
    step: PagedStep, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attention in float64, sequence by sequence -> float64 [T, H, v_dim]"""
    batch, kv, outputs, row = step.batch, step.kv, [], 0
    heads, K = step.q.shape[1], kv.k.shape[1]
    for table, new, total in zip(batch.block_tables, batch.query_lens, batch.seq_lens, strict=True):
        mine = table[: -(-total // BLOCK)].long()
        k, v = (
            x[mine].transpose(1, 2).flatten(0, 1)[:total].double().repeat_interleave(heads // K, 1)
            for x in (kv.k, kv.v)
        )
        q = step.q[row : row + new].double()
        row += new
        position = torch.arange(total - new, total, device=q.device)[:, None]
        key = torch.arange(total, device=q.device)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        scores = (torch.einsum("qhd,lhd->hql", q, k) * scale).masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, new, 1)), -1)
        probs = scores.softmax(-1)[..., :total]
        outputs.append(torch.einsum("hql,lhd->qhd", probs, v.nan_to_num(0.0)))
    return torch.cat(outputs)
