"""Runs a model over a paged cache one step at a time, without a scheduler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotrack.core.tensorspec import TensorSpec
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kvcache.spec import State, group_layers
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables
from hotrack.models import CausalLM, build_model
from hotrack.modelspec.spec import ModelSpec

CPU = torch.device("cpu")


def allocate(specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Separate zero tensors."""
    return {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in specs}


def load_model(
    spec: ModelSpec,
    weights: Mapping[str, Tensor] | Callable[[str], Tensor],
    dtype: torch.dtype = torch.float32,
    tp: TensorParallel | None = None,
) -> CausalLM:
    """A model with ``weights`` (checkpoint names) in place."""
    model = build_model(spec, dtype=dtype, device=CPU, tp=tp or TensorParallel(), allocate=allocate)
    read = weights if callable(weights) else weights.__getitem__
    for target in model.load_plan().values():
        for source in target.sources:
            target.param[source.dest] = read(source.name)[source.select].to(target.param.dtype) + source.add
    model.after_load()
    return model


@dataclass
class SequenceState:
    """Tokens so far computed, and the blocks that hold them; the row of its state (0: none yet), and of its
    states after whole blocks, if a step ended there."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    row: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)


class PagedRunner:
    """Owns a cache; ``step`` runs any mix of decodes and chunks. Blocks are handed out in a scrambled
    order."""

    def __init__(self, model: CausalLM, num_blocks: int = 256, block_size: int = 16) -> None:
        self.model = model
        groups = group_layers(model.cache_specs(), block_size)
        storage = [torch.zeros(num_blocks, g.row_bytes, dtype=torch.uint8) for g in groups]
        for group, packed in zip(groups, storage, strict=True):
            if isinstance(group.spec, State):
                packed.fill_(255)  # NaN in every dtype: no state may be read before it was written
        self.kv = KVTensors(groups, storage, model.dtype)
        self.block_size = block_size
        self.has_states = any(isinstance(group.spec, State) for group in groups)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.free: list[int] = order.tolist()

    def fork(self, parent: SequenceState, tokens: int) -> SequenceState:
        """A sequence that shares the parent's first ``tokens`` (whole blocks) of cache."""
        assert tokens % self.block_size == 0
        row = parent.snapshots[tokens] if self.has_states else 0
        return SequenceState(parent.blocks[: tokens // self.block_size], tokens, row, {tokens: row})

    def _state_rows(self, seqs: Sequence[SequenceState]) -> GroupTables:
        """A sequence reads its last state and overwrites it, unless that is a snapshot."""
        read = [seq.row for seq in seqs]
        for seq in seqs:
            if seq.row in (0, *seq.snapshots.values()):
                seq.row = self.free.pop()
            if seq.computed % self.block_size == 0:
                seq.snapshots[seq.computed] = seq.row
        return GroupTables(
            torch.tensor(read, dtype=torch.int32)[:, None], torch.tensor([seq.row for seq in seqs])
        )

    def batch(self, work: Sequence[tuple[SequenceState, Tensor]]) -> ForwardBatch:
        """``work``: (sequence, its next token ids), sequences with one token first."""
        slots, positions, lens = [], [], []
        for seq, ids in work:
            end = seq.computed + len(ids)
            while len(seq.blocks) * self.block_size < end:
                seq.blocks.append(self.free.pop())
            span = range(seq.computed, end)
            positions += span
            slots += [seq.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            lens.append(len(ids))
            seq.computed = end
        width = max(len(seq.blocks) for seq, _ in work)
        tables = torch.tensor(
            [seq.blocks + [0] * (width - len(seq.blocks)) for seq, _ in work], dtype=torch.int32
        )
        starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
        states = self._state_rows([seq for seq, _ in work])
        ids = torch.cat([ids for _, ids in work])
        return ForwardBatch(
            input_ids=ids,
            positions=torch.tensor(positions),
            query_start=starts,
            seq_lens=torch.tensor([seq.computed for seq, _ in work], dtype=torch.int32),
            logits_rows=torch.arange(len(ids)),
            groups=tuple(
                states if isinstance(group.spec, State) else GroupTables(tables, torch.tensor(slots))
                for group in self.kv.groups
            ),
            num_decodes=next((i for i, n in enumerate(lens) if n > 1), len(lens)),
            query_lens_list=lens,
            seq_lens_list=[seq.computed for seq, _ in work],
        )

    def step(self, work: Sequence[tuple[SequenceState, Tensor]]) -> Tensor:
        """Logits of every token of the step, float32 [T, vocab]."""
        batch = self.batch(work)
        hidden = self.model.forward(batch, self.kv)
        return self.model.compute_logits(hidden[batch.logits_rows])
