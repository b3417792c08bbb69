"""Parameters that stay quantised: the part a rank holds, with the scales that belong to it.

A part must begin and end where blocks do, or its first and last scales would belong to two ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotrack.checkpoint.quantised import FP8, QuantisedTensor
from hotrack.checkpoint.stored import BLOCK_ELEMENTS, StoredTensor
from hotrack.checkpoint.targets import Index, LoadTarget, Source
from hotrack.core.errors import CheckpointError, ConfigError
from hotrack.kernels.reference.quant import quantise_fp8


@dataclass(frozen=True, slots=True)
class KeptScales:
    """Where the scales of one copy go, and the block that shares one."""

    dest: Tensor
    block: tuple[int, int]


def kept_scales(target: LoadTarget, source: Source, tensor: StoredTensor, where: str) -> KeptScales:
    """The place of the scales that belong to ``source``'s part of ``target``.

    Raises:
        ConfigError: the part does not begin and end with a block.
        CheckpointError: the tensor is no matrix.
    """
    assert target.scales is not None
    assert target.param.dtype is torch.float8_e4m3fn, f"{target.param.dtype=}"
    block = target.scales.block
    if len(tensor.shape) != 2 or source.add:
        raise CheckpointError(f"{where} has shape {list(tensor.shape)}; only matrices are kept quantised")
    spans = [s.indices(n)[:2] for s, n in zip(source.select, tensor.shape, strict=False)]
    for axis, (start, stop) in enumerate(spans):
        _check(start, stop, tensor.shape[axis], block[axis], axis, where)
    index = _scale_index(source.dest, target.param, block, where)
    return KeptScales(target.scales.param[index] if index else target.scales.param, block)


def _scale_index(dest: Index, param: Tensor, block: tuple[int, int], where: str) -> Index:
    """``dest`` in units of blocks for the last two dimensions."""
    outer = param.dim() - 2
    found: list[int | slice] = []
    for dim, item in enumerate(dest):
        if dim < outer:
            found.append(item)
            continue
        assert isinstance(item, slice), f"{dest=}"
        size, step = param.shape[dim], block[dim - outer]
        start, stop, _ = item.indices(size)
        _check(start, stop, size, step, dim - outer, where)
        found.append(slice(start // step, -(-stop // step)))
    return tuple(found)


def _check(start: int, stop: int, size: int, block: int, axis: int, where: str) -> None:
    if start % block == 0 and (stop % block == 0 or stop == size):
        return
    what = ("rows", "columns")[axis]
    raise ConfigError(
        f"{where}: this rank's {what} {start} to {stop} of {size} do not begin and end with blocks of "
        f"{block}, so they cannot stay quantised; choose a --tensor-parallel-size whose shares are multiples "
        f"of {block} {what}, spread experts instead of splitting them, or load the model dequantised",
        param="tensor_parallel_size",
    )


def write_kept(tensor: StoredTensor, select: tuple[slice, ...], dest: Tensor, scales: KeptScales) -> None:
    """``dest``, ``scales.dest`` = the part ``select`` of ``tensor``: as stored when it has the same blocks,
    else quantised some rows at a time."""
    if isinstance(tensor, QuantisedTensor) and _same_format(tensor, scales):
        assert tensor.raw is not None
        tensor.raw.copy_into(dest, select)
        row, column = _first(select, 0), _first(select, 1)
        lines = tensor.stored_scales(row // scales.block[0], row // scales.block[0] + len(scales.dest))
        first = column // scales.block[1]
        scales.dest.copy_(lines[:, first : first + scales.dest.shape[1]])
        return
    rows, columns = dest.shape
    step = max(BLOCK_ELEMENTS // max(columns, 1) // scales.block[0], 1) * scales.block[0]
    inner, base = select[1:], _first(select, 0)
    for row in range(0, rows, step):
        end = min(row + step, rows)
        values = torch.empty(end - row, columns)
        tensor.copy_into(values, (slice(base + row, base + end), *inner))
        weight, found = quantise_fp8(values, scales.block)
        dest[row:end].copy_(weight)
        scales.dest[row // scales.block[0] :][: len(found)].copy_(found)


def _same_format(tensor: QuantisedTensor, scales: KeptScales) -> bool:
    return tensor.dtype == FP8 and tensor.block == scales.block and not tensor.part_rows


def _first(select: tuple[slice, ...], axis: int) -> int:
    return (select[axis].start or 0) if axis < len(select) else 0
