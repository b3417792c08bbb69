"""Paged attention on a CPU: gather each sequence's pages, then batched products.

All index arithmetic and masks are made once per step (:class:`CpuAttentionPlan`). A page is one block of
one head, so one ``index_select`` over pages yields K and V as [2, B, H, L, d] without a transpose.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.base import AttentionPlan
from hotrack.kernels.paged import HeadShape, PagedBatch

PRODUCT_BATCH = 8  # decode sequences from which two bf16 batched products beat the fused kernel
QUERY_BLOCK = 128  # queries per product in prefill; skips most of the half above the diagonal


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode sequences of similar length, padded to ``length`` keys.

    rows      int64 [B] rows of the step; None when they are the first ``count`` ones in order
    mask      [B, 1, 1, length], -inf where padded; None when nothing is
    gathered  where every layer in turn collects its pages
    """

    rows: Tensor | None
    count: int
    pages: Tensor
    length: int
    mask: Tensor | None
    gathered: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of one sequence; the first is preceded by ``prefix`` cached ones."""

    rows: slice
    pages: Tensor
    prefix: int
    seq_len: int


def causal_bias(size: int, dtype: torch.dtype) -> Tensor:
    """[size, size]: -inf above the diagonal, 0 elsewhere."""
    return torch.full((size, size), -math.inf, dtype=dtype).triu_(1)


class CpuAttentionPlan(AttentionPlan):
    """Addresses and masks of one step."""

    def __init__(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> None:
        super().__init__(batch)
        H, d, size = heads.num_kv_heads, heads.head_dim, batch.block_size
        self.heads = heads
        self.head_ids = torch.arange(H)
        block, offset = batch.slot_mapping // size, batch.slot_mapping % size
        first = block * (batch.block_stride // d) + offset  # row of head 0's key
        self.new_rows = (first[:, None] + torch.arange(2 * H) * size).flatten()  # [T * 2H], V after K
        self.decodes = self._plan_decodes(dtype)
        self.chunks = self._plan_chunks()
        self.causal = causal_bias(QUERY_BLOCK if self.chunks else 0, dtype)

    def _pages(self, tables: Tensor) -> Tensor:
        """Block tables [B, n] -> page numbers [2 * B * H * n], in the order [K|V] x sequence x head x
        block."""
        batch, H, d = self.batch, self.heads.num_kv_heads, self.heads.head_dim
        first = tables.long() * (batch.block_stride // (batch.block_size * d))
        parts = torch.arange(2)[:, None, None, None] * H + self.head_ids[:, None]
        return (parts + first[None, :, None, :]).flatten()

    def _plan_decodes(self, dtype: torch.dtype) -> list[Decodes]:
        """Sequences shorter than half of the longest get their own group: at most half is padding."""
        lens = self.batch.seq_lens[: self.batch.num_decodes]
        left, groups = list(range(len(lens))), []
        while left:
            longest = max(lens[i] for i in left)
            similar = [i for i in left if 2 * lens[i] >= longest]
            left = [i for i in left if 2 * lens[i] < longest]
            rows = None if len(similar) == len(lens) else torch.tensor(similar)
            groups.append(self._plan_group(rows, [lens[i] for i in similar], dtype))
        return groups

    def _plan_group(self, rows: Tensor | None, lens: list[int], dtype: torch.dtype) -> Decodes:
        size, heads = self.batch.block_size, self.heads
        blocks = -(-max(lens) // size)
        tables = self.batch.block_tables[: len(lens)] if rows is None else self.batch.block_tables[rows]
        pages = self._pages(tables[:, :blocks])
        gathered = torch.empty(len(pages), size * heads.head_dim, dtype=dtype)
        if len(lens) == 1:
            return Decodes(rows, 1, pages, lens[0], None, gathered)
        length = blocks * size
        hidden = torch.arange(length) >= torch.tensor(lens)[:, None]  # [B, length]
        mask = torch.zeros(len(lens), 1, 1, length, dtype=dtype)
        return Decodes(
            rows, len(lens), pages, length, mask.masked_fill_(hidden[:, None, None], -math.inf), gathered
        )

    def _plan_chunks(self) -> list[Chunk]:
        batch, chunks, start = self.batch, [], self.batch.num_decodes
        for i in range(batch.num_decodes, len(batch.seq_lens)):
            new, total = batch.query_lens[i], batch.seq_lens[i]
            blocks = -(-total // batch.block_size)
            pages = self._pages(batch.block_tables[i : i + 1, :blocks])
            chunks.append(Chunk(slice(start, start + new), pages, total - new, total))
            start += new
        return chunks


def write_kv(new: Tensor, rows: Tensor, plan: CpuAttentionPlan) -> None:
    """new [T, 2 * H * d] into ``rows`` [N, d]; K's and V's pages of a block lie side by side."""
    rows.index_copy_(0, plan.new_rows, new.reshape(-1, plan.heads.head_dim))


def paged_attention(q: Tensor, pages: Tensor, plan: CpuAttentionPlan, scale: float) -> Tensor:
    """q [T, num_heads, d], pages [N, block_size * d] -> [T, num_heads, d]"""
    if not plan.chunks and len(plan.decodes) == 1:
        return _decode(q, pages, plan.heads, plan.decodes[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in plan.decodes:
        if group.rows is None:
            out[: group.count] = _decode(q[: group.count], pages, plan.heads, group, scale)
        else:
            out[group.rows] = _decode(q[group.rows], pages, plan.heads, group, scale)
    for chunk in plan.chunks:
        _prefill(q[chunk.rows], pages, plan, chunk, scale, out[chunk.rows])
    return out


def _decode(q: Tensor, pages: Tensor, heads: HeadShape, group: Decodes, scale: float) -> Tensor:
    """One query per sequence; the query heads of a K/V head become the rows of one product."""
    B, H, G, d = group.count, heads.num_kv_heads, heads.group_size, heads.head_dim
    k, v = torch.index_select(pages, 0, group.pages, out=group.gathered).view(2, B, H, -1, d).unbind()
    if B < PRODUCT_BATCH or q.dtype != torch.bfloat16:
        if group.mask is None:
            k, v = k[:, :, : group.length], v[:, :, : group.length]
        mask = None if group.mask is None else group.mask.expand(-1, -1, G, -1)
        queries = q.reshape(B, H, G, d)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
        return out.reshape(B, heads.num_heads, d)
    scores = torch.bmm(q.reshape(B * H, G, d) * scale, k.view(B * H, -1, d).transpose(1, 2))
    if group.mask is not None:
        scores.view(B, H, G, -1).add_(group.mask)
    return torch.bmm(scores.softmax(-1), v.view(B * H, -1, d)).view(B, heads.num_heads, d)


def _prefill(
    q: Tensor, pages: Tensor, plan: CpuAttentionPlan, chunk: Chunk, scale: float, out: Tensor
) -> None:
    """q, out [Q, num_heads, d]. Blocks of queries against all keys up to the block's last position."""
    heads = plan.heads
    H, G, d = heads.num_kv_heads, heads.group_size, heads.head_dim
    kv = torch.index_select(pages, 0, chunk.pages).view(2, H, -1, d)
    k, v = kv[0].transpose(1, 2), kv[1]  # [H, d, L], [H, L, d]
    for start in range(0, len(q), QUERY_BLOCK):
        n = min(QUERY_BLOCK, len(q) - start)
        first, last = chunk.prefix + start, chunk.prefix + start + n
        queries = q[start : start + n].view(n, H, G, d).transpose(0, 1).reshape(H, n * G, d)
        scores = torch.bmm(queries * scale, k[:, :, :last])  # [H, n * G, last], query-major
        scores.view(H, n, G, last)[..., first:] += plan.causal[:n, None, :n]
        result = torch.bmm(scores.softmax(-1), v[:, :last])
        out[start : start + n].view(n, H, G, d).copy_(result.view(H, n, G, d).transpose(0, 1))
