"""Per-layer views into the packed rows of the cache groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrack.kernels.paged import LayerKV
from hotrack.kvcache.spec import CacheGroup


class KVTensors:
    """The cache as layers see it.

    ``storage[g]`` is group g's contiguous uint8 tensor [num_blocks, row_bytes]. All views share its
    memory, so they stay valid for as long as that address range does.
    """

    def __init__(self, groups: Sequence[CacheGroup], storage: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.groups = tuple(groups)
        self.storage = tuple(storage)
        self.dtype = dtype
        views: dict[int, LayerKV] = {}
        group_of: dict[int, int] = {}
        for index, (group, packed) in enumerate(zip(groups, storage, strict=True)):
            if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != group.row_bytes:
                raise ValueError(
                    f"cache group {index} needs a uint8 tensor [num_blocks, {group.row_bytes}], "
                    f"got {packed.dtype} {tuple(packed.shape)}"
                )
            elements = packed.view(dtype)
            for layer, offset in zip(group.layers, group.layer_offsets, strict=True):
                views[layer] = _layer_view(elements, offset // dtype.itemsize, group)
                group_of[layer] = index
        self.layers = [views[layer] for layer in range(len(views))]
        self.group_of = [group_of[layer] for layer in range(len(views))]

    def k(self, layer: int) -> Tensor:
        """[num_blocks, H, block_size, k_dim]"""
        return self.layers[layer].k

    def v(self, layer: int) -> Tensor:
        """[num_blocks, H, block_size, v_dim]"""
        return self.layers[layer].v


def _layer_view(packed: Tensor, offset: int, group: CacheGroup) -> LayerKV:
    """packed [num_blocks, row elements]; ``offset``: the layer's first element in a row."""
    spec, size = group.spec, group.block_size
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
