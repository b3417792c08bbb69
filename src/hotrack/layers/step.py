"""What a step's layers share, computed once before the first of them."""

from dataclasses import dataclass

from torch import Tensor

from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.paged import HeadShape, PagedBatch
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch


@dataclass(slots=True)
class Step:
    """cos, sin [T, 1, rotated dim]; one attention plan per cache group; the cache."""

    cos: Tensor
    sin: Tensor
    plans: list[AttentionPlan]
    kv: KVTensors


def plan_groups(batch: ForwardBatch, kv: KVTensors, heads: HeadShape, ops: Ops) -> list[AttentionPlan]:
    """One plan per cache group of ``batch``."""
    plans = []
    for group, tables in zip(kv.groups, batch.groups, strict=True):
        stride = group.row_bytes // kv.dtype.itemsize
        paged = PagedBatch(
            tables.block_tables,
            tables.slot_mapping,
            batch.query_lens_list,
            batch.seq_lens_list,
            batch.num_decodes,
            group.block_size,
            stride,
            batch.query_start,
            batch.seq_lens,
        )
        plans.append(ops.plan_attention(paged, heads, kv.dtype))
    return plans
