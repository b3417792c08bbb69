"""Per-layer views into the packed rows of the cache groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrack.kernels.paged import LayerKV
from hotrack.kvcache.spec import CacheGroup, State


class KVTensors:
    """The cache as layers see it.

    ``storage[g]`` is group g's contiguous uint8 tensor [num_blocks, row_bytes]. All views share its
    memory, so they stay valid for as long as that address range does. Groups may differ in num_blocks.

    layers    layer index -> keys and values, of layers that have them
    states    layer index -> its state tensors, each [num_blocks, *shape], of layers that keep a state
    group_of  layer index -> index of its group
    """

    def __init__(self, groups: Sequence[CacheGroup], storage: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.groups = tuple(groups)
        self.storage = tuple(storage)
        self.dtype = dtype
        self.layers: dict[int, LayerKV] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}
        self.group_of: dict[int, int] = {}
        for index, (group, packed) in enumerate(zip(groups, storage, strict=True)):
            if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != group.row_bytes:
                raise ValueError(
                    f"cache group {index} needs a uint8 tensor [num_blocks, {group.row_bytes}], "
                    f"got {packed.dtype} {tuple(packed.shape)}"
                )
            for layer, offset in zip(group.layers, group.layer_offsets, strict=True):
                self.group_of[layer] = index
                if isinstance(group.spec, State):
                    self.states[layer] = _state_views(packed, offset, group.spec)
                else:
                    self.layers[layer] = _layer_view(packed.view(dtype), offset // dtype.itemsize, group)

    def k(self, layer: int) -> Tensor:
        """[num_blocks, H, block_size, k_dim]"""
        return self.layers[layer].k

    def v(self, layer: int) -> Tensor:
        """[num_blocks, H, block_size, v_dim]"""
        return self.layers[layer].v


def _state_views(packed: Tensor, offset: int, spec: State) -> tuple[Tensor, ...]:
    """packed uint8 [num_blocks, row_bytes]; ``offset``: the layer's first byte in a row."""
    views = []
    for tensor, start in zip(spec.tensors, spec.offsets, strict=True):
        flat = packed[:, offset + start : offset + start + tensor.nbytes]
        views.append(flat.view(getattr(torch, tensor.dtype)).view(len(packed), *tensor.shape))
    return tuple(views)


def _layer_view(packed: Tensor, offset: int, group: CacheGroup) -> LayerKV:
    """packed [num_blocks, row elements]; ``offset``: the layer's first element in a row."""
    spec, size = group.spec, group.block_size
    assert not isinstance(spec, State), f"{spec} has no keys and values"
    blocks, stride = packed.shape
    base = packed.storage_offset() + offset

    def view(dim: int, start: int) -> Tensor:
        shape, strides = (blocks, spec.num_heads, size, dim), (stride, size * dim, dim, 1)
        return packed.as_strided(shape, strides, base + start)

    k, v = view(spec.k_dim, 0), view(spec.v_dim, spec.num_heads * size * spec.k_dim)
    rows = pages = None
    page = size * spec.k_dim
    if spec.k_dim == spec.v_dim and stride % page == 0:
        flat = packed.flatten()[offset:]
        rows = flat[: flat.numel() // spec.k_dim * spec.k_dim].view(-1, spec.k_dim)
        pages = flat[: flat.numel() // page * page].view(-1, page)
    return LayerKV(k, v, rows, pages)
