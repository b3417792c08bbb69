"""Parameters that stay quantised: the part a rank holds, with the scales that belong to it.

A part must begin and end where blocks do, or its first and last scales would belong to two ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotrack.checkpoint.quantised import FP8, MXFP4, POWERS, QuantisedTensor
from hotrack.checkpoint.stored import BLOCK_ELEMENTS, StoredTensor
from hotrack.checkpoint.targets import Index, LoadTarget, Source
from hotrack.core.errors import CheckpointError, ConfigError
from hotrack.kernels.reference.quant import encode_e8m0, quantise_fp8, quantise_mxfp4

FORMATS = {torch.float8_e4m3fn: FP8, torch.uint8: MXFP4}
PER_BYTE = {FP8: 1, MXFP4: 2}


@dataclass(frozen=True, slots=True)
class KeptScales:
    """Where the scales of one copy go, the block that shares one, and the format of the values."""

    dest: Tensor
    block: tuple[int, int]
    format: str

    @property
    def powers(self) -> bool:
        """Scales are kept as E8M0 bytes."""
        return self.dest.dtype is torch.uint8


def columns_of(target: LoadTarget, columns: int) -> int:
    """Columns of a parameter that hold ``columns`` values."""
    return columns // PER_BYTE[FORMATS[target.param.dtype]] if target.scales is not None else columns


def kept_scales(target: LoadTarget, source: Source, tensor: StoredTensor, where: str) -> KeptScales:
    """The place of the scales that belong to ``source``'s part of ``target``.

    Raises:
        ConfigError: the part does not begin and end with a block.
        CheckpointError: the tensor is no matrix.
    """
    assert target.scales is not None
    block, kept = target.scales.block, FORMATS[target.param.dtype]
    if len(tensor.shape) != 2 or source.add:
        raise CheckpointError(f"{where} has shape {list(tensor.shape)}; only matrices are kept quantised")
    spans = [s.indices(n)[:2] for s, n in zip(source.select, tensor.shape, strict=False)]
    for axis, (start, stop) in enumerate(spans):
        _check(start, stop, tensor.shape[axis], block[axis], axis, where)
    index = _scale_index(source.dest, target.param, (block[0], block[1] // PER_BYTE[kept]), where)
    return KeptScales(target.scales.param[index] if index else target.scales.param, block, kept)


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
    """``dest``, ``scales.dest`` = the part ``select`` of ``tensor``: as stored when it has the same format,
    else quantised some rows at a time."""
    if isinstance(tensor, QuantisedTensor) and _same_format(tensor, scales):
        _copy_stored(tensor, select, dest, scales)
        return
    rows, columns = dest.shape[0], dest.shape[1] * PER_BYTE[scales.format]
    step = max(BLOCK_ELEMENTS // max(columns, 1) // scales.block[0], 1) * scales.block[0]
    inner, base = select[1:], _first(select, 0)
    for row in range(0, rows, step):
        end = min(row + step, rows)
        values = torch.empty(end - row, columns)
        tensor.copy_into(values, (slice(base + row, base + end), *inner))
        weight, found = _quantise(values, scales)
        dest[row:end].copy_(weight)
        _put(found, scales.dest[row // scales.block[0] :][: len(found)])


def _copy_stored(
    tensor: QuantisedTensor, select: tuple[slice, ...], dest: Tensor, scales: KeptScales
) -> None:
    assert tensor.raw is not None
    packing = PER_BYTE[scales.format]
    row, column = _first(select, 0), _first(select, 1)
    columns = slice(column // packing, column // packing + dest.shape[1])
    tensor.raw.copy_into(dest, (slice(row, row + len(dest)), columns))
    lines = tensor.stored_scales(row // scales.block[0], row // scales.block[0] + len(scales.dest))
    first = column // scales.block[1]
    _put(lines[:, first : first + scales.dest.shape[1]], scales.dest)


def _quantise(values: Tensor, scales: KeptScales) -> tuple[Tensor, Tensor]:
    if scales.format == MXFP4:
        return quantise_mxfp4(values)
    return quantise_fp8(values, scales.block, power_of_two=scales.powers)


def _put(found: Tensor, dest: Tensor) -> None:
    dest.copy_(encode_e8m0(found) if dest.dtype is torch.uint8 else found)


def _same_format(tensor: QuantisedTensor, scales: KeptScales) -> bool:
    assert tensor.scales is not None
    same = tensor.dtype == scales.format and tensor.block == scales.block and not tensor.part_rows
    return same and (not scales.powers or tensor.scales.dtype in POWERS)


def _first(select: tuple[slice, ...], axis: int) -> int:
    return (select[axis].start or 0) if axis < len(select) else 0
