"""The one argument every layer receives besides its input. Passed, never ambient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class GroupTables:
    """Addressing of one cache group in this step.

    ``block_tables``: int32 [S, max_blocks]; unused entries are 0. ``slot_mapping``: int64 [T], block *
    block_size + offset for every token of the step (where its K and V are written).

    Of a group of states: ``block_tables`` int32 [S, 1], the row each sequence reads, 0 when it is at its
    first token (it starts from zeros then, whatever row 0 holds); ``slot_mapping`` int64 [S], the row that
    its state after this step goes to. The two may be the same row. ``layers.step.plan_states`` makes a
    ``StatePlan`` of them.
    """

    block_tables: Tensor
    slot_mapping: Tensor


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of S sequences, decode sequences (one token each) first, then prefill chunks.

    input_ids       int64 [T]
    positions       int64 [T]
    query_start     int32 [S+1]  token offsets of each sequence in this step
    seq_lens        int32 [S]    tokens in the KV cache after this step (cached + new)
    logits_rows     int64 [R]    rows of the hidden state that need logits
    groups          one GroupTables per cache group, in the order of ``group_layers``; all with the same S
    num_decodes     how many leading sequences have exactly one token

    The ``*_list`` twins are the same numbers on the host, so a kernel that loops over sequences does not
    sync the device. ``wait_for``, given while weights are still arriving, is called with the names of the
    parameters that are about to be read; it makes the device wait for them, not the host.
    """

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    logits_rows: Tensor
    groups: tuple[GroupTables, ...]
    num_decodes: int
    query_lens_list: list[int]
    seq_lens_list: list[int]
    wait_for: Callable[[Sequence[str]], None] | None = None
