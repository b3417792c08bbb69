"""Attention over a paged cache."""

import torch
from torch import Tensor

from hotrack.kernels.paged import LayerKV, PagedBatch


def write_kv(new: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """Store new [T, H * k_dim + H * v_dim] (K of every head, then V) at its slots."""
    heads, k_dim, v_dim = kv.k.shape[1], kv.k.shape[3], kv.v.shape[3]
    k, v = new[:, : heads * k_dim], new[:, heads * k_dim :]
    blocks, offsets = slot_mapping // kv.block_size, slot_mapping % kv.block_size
    kv.k[blocks, :, offsets] = k.reshape(-1, heads, k_dim)
    kv.v[blocks, :, offsets] = v.reshape(-1, heads, v_dim)


def paged_attention(
    q: Tensor,
    kv: LayerKV,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal grouped-query attention of new tokens over everything cached so far, themselves included.

    q [T, num_heads, k_dim] -> [T, num_heads, v_dim]. Query i of a sequence sits at position
    ``seq_len - query_len + i`` and sees keys up to its own position, the last ``window`` of them if given (or
    the batch has one). Query heads ``g*n .. g*n+n-1`` share K/V head g. ``sinks`` float32 [num_heads]: a
    score per head that takes part in the softmax and has no value (Xiao et al., 2023).
    """
    outputs, start = [], 0
    window = window or batch.window
    for table, query_len, seq_len in zip(batch.block_tables, batch.query_lens, batch.seq_lens, strict=True):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        block = first // kv.block_size  # those before it may be freed
        blocks = table[block : -(-seq_len // kv.block_size)].long()
        length = seq_len - block * kv.block_size
        k = kv.k[blocks].transpose(1, 2).flatten(0, 1)[:length].float()  # [L, H, k_dim]
        v = kv.v[blocks].transpose(1, 2).flatten(0, 1)[:length].float()  # [L, H, v_dim]
        queries = (
            q[start : start + query_len].float().view(query_len, k.shape[1], -1, q.shape[2])
        )  # [Q, H, G, k_dim]
        scores = torch.einsum("qhgd,lhd->hgql", queries, k) * scale
        query_pos = torch.arange(length - query_len, length, device=q.device)[:, None]
        key_pos = torch.arange(length, device=q.device)
        visible = key_pos <= query_pos
        if window is not None:
            visible &= key_pos > query_pos - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.view(*scores.shape[:2], 1, 1).expand(-1, -1, query_len, 1)
            scores = torch.cat((scores, column), -1)
        probs = scores.softmax(-1)[..., :length]
        outputs.append(torch.einsum("hgql,lhd->qhgd", probs, v).flatten(1, 2).to(q.dtype))
        start += query_len
    return torch.cat(outputs)
