"""What a step's layers share, computed once before the first of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.paged import HeadShape, PagedBatch
from hotrack.kernels.recurrent import StatePlan
from hotrack.kvcache.spec import CacheGroup, Paged, State, Window
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables


@dataclass(slots=True)
class Step:
    """rotary: cos, sin [T, 1, rotated dim] of each rotary embedding of the model; the cache; its plans.

    ``plans`` and ``states`` are by cache group: a layer finds its own under ``kv.group_of[layer]``, in
    ``plans`` if it has keys and values, in ``states`` if it keeps a state.
    """

    rotary: list[tuple[Tensor, Tensor]]
    plans: dict[int, AttentionPlan]
    states: dict[int, StatePlan]
    kv: KVTensors


def plan_attention(
    batch: ForwardBatch, kv: KVTensors, heads: Mapping[int, HeadShape], ops: Ops
) -> dict[int, AttentionPlan]:
    """One plan per cache group of a key and a value per token. ``heads``: of each layer that has them."""
    plans = {}
    for index, (group, tables) in enumerate(zip(kv.groups, batch.groups, strict=True)):
        if isinstance(group.spec, State) or _ratio(group) != 1:
            continue
        paged = PagedBatch(
            tables.block_tables,
            tables.slot_mapping,
            batch.query_lens_list,
            batch.seq_lens_list,
            batch.num_decodes,
            group.block_size,
            group.row_bytes // kv.dtype.itemsize,
            batch.query_start,
            batch.seq_lens,
            group.spec.window if isinstance(group.spec, Window) else None,
        )
        plans[index] = ops.plan_attention(paged, heads[group.layers[0]], kv.dtype)
    return plans


def _ratio(group: CacheGroup) -> int:
    return group.spec.ratio if isinstance(group.spec, Paged) else 1


def plan_states(batch: ForwardBatch, kv: KVTensors) -> dict[int, StatePlan]:
    """One plan per cache group of states."""
    return {
        index: plan_state(batch, tables)
        for index, (group, tables) in enumerate(zip(kv.groups, batch.groups, strict=True))
        if isinstance(group.spec, State)
    }


def plan_state(batch: ForwardBatch, tables: GroupTables) -> StatePlan:
    """Of one group of states."""
    read = tables.block_tables[:, 0].long()
    return StatePlan(
        read, tables.slot_mapping, read == 0, batch.query_start, batch.query_lens_list, batch.num_decodes
    )
