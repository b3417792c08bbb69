"""What the attention kernels know about a step and about a layer's cache."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one attention layer on this rank. ``head_dim``: width of queries and keys; ``value_dim``: of
    values, when it differs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None

    @property
    def v_dim(self) -> int:
        """Width of a value."""
        return self.value_dim or self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's cache: strided views into packed rows.

    k     [num_blocks, H, block_size, k_dim]
    v     [num_blocks, H, block_size, v_dim]
    rows  [N, dim] and pages [N', block_size * dim]: the memory from this layer's first K element on, cut into
          vectors (one token of one head) and pages (one block of one head), in the order block, [K|V], head.
          None when K and V differ in width or a packed row is no multiple of a page.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None
    pages: Tensor | None

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The sequences of one step over one cache group; decode sequences (one token each) first.

    block_tables  int32 [S, max_blocks]
    slot_mapping  int64 [T], block * block_size + offset of each new token
    query_lens    new tokens of each sequence
    seq_lens      cached + new tokens of each sequence
    num_decodes   leading sequences with exactly one token
    block_size    tokens per block
    block_stride  elements from one block of a layer to its next (a packed row)

    query_start   int32 [S+1] and ``seq_lens_device`` int32 [S]: the lengths where the kernels run
    window        each token sees the last ``window`` ones, itself included; None: all. Blocks before that
                  may be the null block in ``block_tables``
    """

    block_tables: Tensor
    slot_mapping: Tensor
    query_lens: list[int]
    seq_lens: list[int]
    num_decodes: int
    block_size: int
    block_stride: int
    query_start: Tensor | None = None
    seq_lens_device: Tensor | None = None
    window: int | None = None
