"""Per-layer cache kinds and the packed-row layout they are grouped into (no torch).

A model returns one spec per layer. Layers with equal specs form a *group*; a group's storage is
``[num_blocks, row_bytes]`` where one row holds one block of **all** layers of the group. A block is
therefore one contiguous run of bytes: one descriptor to transfer, offload or copy.

All groups count the same *block tokens* P (``--block-size``): a block of :class:`Paged` and :class:`Window`
holds the entries of P tokens, and states are kept for prefix hits at multiples of P.

======================  ==========================================  =====================================
kind                    what a sequence holds                       where a prefix of n * P tokens is a hit
======================  ==========================================  =====================================
``Paged(ratio)``        blocks of all its tokens                    all n blocks are there
``Window(window)``      blocks of its last ``window`` + ``slack``   the blocks of the last ``window - 1``
                        tokens; older ones are freed                tokens before it are there
``State``               one row, rewritten by every step            the state at exactly n * P is there
``OpenGroup(ratio)``    one row: what tokens of the group of      anywhere; with ``overlap`` as ``State``,
                        ``ratio`` that is not full yet left         for the group before it counts
``Alias(layer)``        nothing: reads ``layer``'s entries          wherever ``layer`` has one
======================  ==========================================  =====================================

**States.** A layer with a memory of fixed size returns ``State((StateTensor(shape, dtype), ...))``, without
a dimension for sequences: a gated DeltaNet layer has its last convolution inputs, ``[kernel - 1, channels]``
in the model's dtype, and its matrices, ``[value heads, key dim, value dim]`` in float32. The layer sees
``KVTensors.states[layer]``, one strided view ``[rows, *shape]`` per tensor. In every step each sequence has a
row to *read* and a row to *write* (``layers.batch.GroupTables``); they may be the same or differ, and the
layer must write the state after the step's last token of each sequence whatever they are. Row 0 is the null
row: a sequence that reads it is at its first token and starts from zeros, *whatever row 0 holds*. Rows are
not cleared when they are handed out.

A snapshot needs no copy. Where a step ends on a multiple of P, the manager lets the next step write
another row, and names the old one in the prefix cache: it now holds the state at that position for good. A
later sequence with the same prefix reads that row in its first step and writes its own. The scheduler makes
a prompt's last chunk but one end at the last multiple of P of the prompt, so that there is a snapshot to
find.

**Open groups.** A layer that makes one :class:`Paged` entry of every ``ratio`` tokens keeps what it needs of
the tokens since the last entry in an ``OpenGroup``: a ring of rows, one per token, at ``position %
capacity``. It is addressed like a state, and written in place; P is a multiple of ``ratio``, so at a block's
end the group is empty, and there is nothing to keep for a prefix hit unless groups overlap. In a group of
``Paged(ratio)``, ``slot_mapping`` has a place for each token that completes an entry and -1 for the others.

**Drafts.** ``KVCacheManager.rewind`` forgets up to ``num_drafts`` tokens at the end of a sequence. Paged
entries are simply written again; a window keeps ``slack`` tokens more than it shows; a ring has
``slack`` rows more than it needs; of a state the row before the step is kept until its drafts are decided,
and the next step starts from there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotrack.core.errors import CheckpointError
from hotrack.core.tensorspec import DTYPE_BYTES

ROW_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Paged:
    """Grows with the sequence: one entry per ``ratio`` tokens, addressed by block table, entry = position //
    ratio.

    An entry is ``num_heads`` x (K ``k_dim`` + V ``v_dim``) elements of ``dtype_bytes``.
    """

    num_heads: int
    k_dim: int
    v_dim: int
    dtype_bytes: int
    ratio: int = 1

    @property
    def entry_bytes(self) -> int:
        return self.num_heads * (self.k_dim + self.v_dim) * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class Window:
    """Each token sees the last ``window`` tokens, itself included; blocks that neither the next token nor one
    after a rewind by ``slack`` can see are freed. Block tables are as long as a :class:`Paged` layer's, with
    the null block where blocks were freed."""

    window: int
    num_heads: int
    k_dim: int
    v_dim: int
    dtype_bytes: int
    slack: int = 0

    @property
    def entry_bytes(self) -> int:
        return self.num_heads * (self.k_dim + self.v_dim) * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of one sequence's state: its shape and torch's name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class State:
    """A memory of fixed size: the tensors that each sequence keeps in this layer."""

    tensors: tuple[StateTensor, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the layer's slice of a row."""
        found, offset = [], 0
        for tensor in self.tensors:
            found.append(offset)
            offset += _aligned(tensor.nbytes)
        return tuple(found)

    @property
    def slice_bytes(self) -> int:
        return sum(_aligned(tensor.nbytes) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class OpenGroup(State):
    """A state with one tensor, a ring of rows [capacity, width] for the tokens of an unfinished group (and,
    with ``overlap``, of the group before it), see :func:`open_group`."""

    ratio: int
    overlap: bool
    slack: int


def open_group(ratio: int, width: int, dtype: str, *, overlap: bool = False, slack: int = 0) -> OpenGroup:
    """A ring with room for ``slack`` drafts beyond one group of ``ratio`` tokens, or two that overlap."""
    capacity = ratio * (2 if overlap else 1) + slack
    return OpenGroup((StateTensor((capacity, width), dtype),), ratio, overlap, slack)


@dataclass(frozen=True, slots=True)
class Alias:
    """Reads the entries of ``layer``, an earlier layer, and writes none."""

    layer: int


StoredSpec = Paged | Window | State
CacheSpec = StoredSpec | Alias


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. ``layer_offsets[i]`` is the byte offset of ``layers[i]`` inside a
    row; an alias has the offset of the layer it reads.

    Inside a layer's slice the order is ``[K|V] x [num_heads] x [block_size] x [dim]`` (K of every head, then
    V), so one head's keys of a block are contiguous; or, of a state, tensor by tensor.

    ``block_size``: entries of a block; ``tokens_per_block``: the tokens they stand for, equal in all groups
    of a model.
    """

    spec: StoredSpec
    layers: tuple[int, ...]
    block_size: int
    row_bytes: int
    layer_offsets: tuple[int, ...]

    @property
    def tokens_per_block(self) -> int:
        return self.block_size * (self.spec.ratio if isinstance(self.spec, Paged) else 1)


def group_layers(layer_specs: Sequence[CacheSpec], block_size: int) -> tuple[CacheGroup, ...]:
    """Group equal specs in order of first appearance; every layer slice starts on a ``ROW_ALIGN``
    boundary. ``block_size``: tokens per block.

    Raises:
        CheckpointError: ``block_size`` is no multiple of a layer's ratio.
    """
    by_spec: dict[StoredSpec, list[int]] = {}
    for layer, spec in enumerate(layer_specs):
        if not isinstance(spec, Alias):
            by_spec.setdefault(spec, []).append(layer)
    groups = []
    for stored, layers in by_spec.items():
        ratio = stored.ratio if isinstance(stored, Paged | OpenGroup) else 1
        if block_size % ratio:
            raise CheckpointError(
                f"layers {layers} keep one entry per {ratio} tokens, which does not divide a block of "
                f"{block_size} tokens; choose --block-size as a multiple of {ratio}"
            )
        entries = block_size // ratio if isinstance(stored, Paged) else block_size
        size = stored.slice_bytes if isinstance(stored, State) else _aligned(stored.entry_bytes * entries)
        offsets = tuple(i * size for i in range(len(layers)))
        groups.append(CacheGroup(stored, tuple(layers), entries, size * len(layers), offsets))
    for layer, spec in enumerate(layer_specs):
        if isinstance(spec, Alias):
            _add_alias(groups, layer, spec.layer)
    return tuple(groups)


def _add_alias(groups: list[CacheGroup], layer: int, source: int) -> None:
    for index, group in enumerate(groups):
        if source in group.layers:
            offset = group.layer_offsets[group.layers.index(source)]
            groups[index] = replace(
                group, layers=(*group.layers, layer), layer_offsets=(*group.layer_offsets, offset)
            )
            return
    raise CheckpointError(f"layer {layer} reads the cache of layer {source}, which keeps none of its own")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ROW_ALIGN) * ROW_ALIGN
