"""Paged attention on a GPU: gather K and V of some sequences, then one flash call over all of them.

All index arithmetic is made once per step on the device (:class:`CudaAttentionPlan`). A vector is one token
of one head, so one ``index_select`` yields K and V as [2, L, H, d], the layout of variable-length attention.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotrack.kernels.base import AttentionPlan
from hotrack.kernels.paged import HeadShape, PagedBatch

GATHER_TOKENS = 1 << 17  # gathered at a time, unless a single sequence is longer: bounds the workspace
LONG_PROMPT = 2048  # tokens from which cuDNN is asked
PROMPT_STEP = 512  # its lengths
MASK_QUERIES = 1024  # rows of a mask in memory at a time, where the flash kernel does not apply


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring sequences that are gathered and attended together.

    rows              of q
    vectors           int64 [2 * L * H]: where their K, then their V lie, token by token
    query_start       int32 [n+1], from 0; ``query_lens`` the same as lengths on the host
    key_start         int32 [n+1], from 0; ``key_lens`` likewise
    """

    rows: slice
    vectors: Tensor
    query_start: Tensor
    key_start: Tensor
    query_lens: list[int]
    key_lens: list[int]


class CudaAttentionPlan(AttentionPlan):
    """Addresses of one step. The first ``num_elsewhere`` sequences get no span: another kernel attends
    them."""

    def __init__(self, batch: PagedBatch, heads: HeadShape, num_elsewhere: int = 0) -> None:
        super().__init__(batch)
        assert batch.query_start is not None, "the device's kernels need device offsets"
        assert batch.seq_lens_device is not None, "the device's kernels need device lengths"
        self.heads = heads
        self.num_elsewhere = num_elsewhere
        size, device = batch.block_size, batch.slot_mapping.device
        parts = torch.arange(2 * heads.num_kv_heads, device=device) * size
        block, offset = batch.slot_mapping // size, batch.slot_mapping % size
        first = block * (batch.block_stride // heads.head_dim) + offset  # vector of head 0's key
        self.new_vectors = (first[:, None] + parts).flatten()  # [T * 2H], V after K
        ends = batch.seq_lens_device.cumsum(0, dtype=torch.int32)
        self._key_start = F.pad(ends, (1, 0))
        self._parts = parts.view(2, 1, heads.num_kv_heads)
        self.spans = list(self._spans())

    def _spans(self) -> Iterator[Span]:
        batch, row = self.batch, sum(self.batch.query_lens[: self.num_elsewhere])
        for first, last in _runs(batch.seq_lens, self.num_elsewhere, batch.num_decodes):
            query_lens, key_lens = batch.query_lens[first:last], batch.seq_lens[first:last]
            rows = slice(row, row + sum(query_lens))
            assert batch.query_start is not None, "see the constructor"
            query_start, key_start = batch.query_start[first : last + 1], self._key_start[first : last + 1]
            yield Span(
                rows,
                self._vectors(first, last, key_start, sum(key_lens)),
                query_start - query_start[:1],
                key_start - key_start[:1],
                query_lens,
                key_lens,
            )
            row = rows.stop

    def _vectors(self, first: int, last: int, key_start: Tensor, total: int) -> Tensor:
        batch, device = self.batch, key_start.device
        # output_size: without it the device would have to be asked for the sum.
        index = torch.repeat_interleave(
            torch.arange(last - first, device=device), key_start.diff().long(), output_size=total
        )
        position = torch.arange(total, device=device) - (key_start[:-1] - key_start[:1])[index]
        block = batch.block_tables[first:last][index, position // batch.block_size].long()
        vector = block * (batch.block_stride // self.heads.head_dim) + position % batch.block_size
        return (vector[:, None] + self._parts).flatten()


def _runs(lens: Sequence[int], first: int, num_decodes: int) -> Iterator[tuple[int, int]]:
    """(first, last) of neighbours that together have at most GATHER_TOKENS; decodes stay among themselves."""
    tokens = 0
    for index in range(first, len(lens)):
        if index > first and (tokens + lens[index] > GATHER_TOKENS or index == num_decodes):
            yield first, index
            first, tokens = index, 0
        tokens += lens[index]
    if first < len(lens):
        yield first, len(lens)


def write_kv(new: Tensor, vectors: Tensor, plan: CudaAttentionPlan) -> None:
    """new [T, 2 * H * d] into ``vectors`` [N, d]."""
    vectors.index_copy_(0, plan.new_vectors, new.reshape(-1, plan.heads.head_dim))


def paged_attention(q: Tensor, vectors: Tensor, plan: CudaAttentionPlan, scale: float) -> Tensor:
    """q [T, num_heads, d], vectors [N, d] -> [T', num_heads, d], the rows of the plan's spans"""
    flash = flash_varlen if _has_flash(q) else masked_varlen
    outputs = []
    for span in plan.spans:
        heads = plan.heads
        kv = vectors.index_select(0, span.vectors).view(2, -1, heads.num_kv_heads, heads.head_dim)
        attend = whole_prompt if _is_long_prompt(q, span) else flash
        outputs.append(attend(q[span.rows], kv[0], kv[1], span, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Tensor:
    """torch's FlashAttention (Dao, 2023). Its causal mask is aligned to each sequence's last key, which is
    what a chunk after cached tokens needs. q [Q, num_heads, d], k and v [L, H, d] -> [Q, num_heads, d]"""
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        span.query_start,
        span.key_start,
        max(span.query_lens),
        max(span.key_lens),
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
        scale=scale,
    )[0]


def _is_long_prompt(q: Tensor, span: Span) -> bool:
    """One sequence without cached tokens, on a device whose cuDNN attends fastest."""
    whole = len(span.query_lens) == 1 and span.query_lens == span.key_lens
    return whole and span.query_lens[0] >= LONG_PROMPT and _has_flash(q) and _has_fast_cudnn(q.device.index)


@functools.cache
def _has_fast_cudnn(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0) and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def whole_prompt(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Tensor:
    """cuDNN's attention, for a prompt from its beginning: 0.95 ms where FlashAttention 2 takes 1.76 (8,192
    tokens, 32 heads of 128, H200). It prepares itself per length, so lengths are padded: what is behind a
    token does not count. Arguments as :func:`flash_varlen`'s."""
    tokens = len(q)
    padding = (0, 0, 0, 0, 0, -tokens % PROMPT_STEP)
    q, k, v = ((F.pad(x, padding) if padding[-1] else x).transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)[: span.query_lens[0]]


def masked_varlen(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Tensor:
    """The twin of :func:`flash_varlen` for every dtype and device: sequence by sequence, with a mask."""
    outputs, key = [], 0
    for queries, query_len, key_len in zip(
        torch.split(q, span.query_lens), span.query_lens, span.key_lens, strict=True
    ):
        keys, values = (x[key : key + key_len].transpose(0, 1)[None] for x in (k, v))
        key += key_len
        for start in range(0, query_len, MASK_QUERIES):
            part = queries[start : start + MASK_QUERIES]
            position = torch.arange(len(part), device=q.device) + (key_len - query_len + start)
            mask = torch.arange(key_len, device=q.device) <= position[:, None]
            out = F.scaled_dot_product_attention(
                part.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
