"""Per-layer cache kinds and the packed-row layout they are grouped into (no torch).

A model returns one list of specs per layer. Layers with equal specs form a *group*; a group's storage is
``[num_blocks, row_bytes]`` where one row holds one block of **all** layers of the group. A block is
therefore one
contiguous run of bytes: one descriptor to transfer, offload or copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Only the last ``window`` tokens (plus ``slack`` for drafts) are live; older blocks are freed."""

    window: int
    num_heads: int
    k_dim: int
    v_dim: int
    dtype_bytes: int
    slack: int = 0

    @property
    def entry_bytes(self) -> int:
        return self.num_heads * (self.k_dim + self.v_dim) * self.dtype_bytes


CacheSpec = Paged | Window


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. ``layer_offsets[i]`` is the byte offset of ``layers[i]`` inside a
    row.

    Inside a layer's slice the order is ``[K|V] x [num_heads] x [block_size] x [dim]`` (K of every head, then
    V), so one
    head's keys of a block are contiguous.
    """

    spec: CacheSpec
    layers: tuple[int, ...]
    block_size: int
    row_bytes: int
    layer_offsets: tuple[int, ...]

    @property
    def tokens_per_block(self) -> int:
        return self.block_size * (self.spec.ratio if isinstance(self.spec, Paged) else 1)


def group_layers(layer_specs: Sequence[CacheSpec], block_size: int) -> tuple[CacheGroup, ...]:
    """Group equal specs in order of first appearance; every layer slice starts on a ``ROW_ALIGN``
    boundary."""
    by_spec: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(layer_specs):
        by_spec.setdefault(spec, []).append(layer)
    groups = []
    for spec, layers in by_spec.items():
        slice_bytes = -(-spec.entry_bytes * block_size // ROW_ALIGN) * ROW_ALIGN
        offsets = tuple(i * slice_bytes for i in range(len(layers)))
        groups.append(CacheGroup(spec, tuple(layers), block_size, slice_bytes * len(layers), offsets))
    return tuple(groups)
