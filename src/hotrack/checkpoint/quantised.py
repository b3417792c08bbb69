"""Quantised tensors of a safetensors checkpoint: stored values and their scales, read as one tensor.

A weight's scales are a tensor of their own beside it. Both together read like any other tensor, dequantised a
block of rows at a time; a parameter that keeps the published format gets the stored values and the scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from hotrack.checkpoint.safetensors_format import plain
from hotrack.checkpoint.stored import StoredTensor
from hotrack.core.errors import CheckpointError
from hotrack.kernels.reference.quant import (
    MXFP4_GROUP,
    decode_e4m3,
    decode_e8m0,
    dequantise_mxfp4,
    scale_columns,
)
from hotrack.modelspec.fields import shorten
from hotrack.modelspec.spec import ModelSpec

SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")
UNUSED_SUFFIXES = (".input_scale", ".activation_scale")  # of activations, which are not quantised here
FP8 = "float8_e4m3fn"
MXFP4 = "mxfp4"
BYTES = ("int8", "uint8")
POWERS = ("float8_e8m0fnu", "uint8")


@dataclass(frozen=True, slots=True)
class QuantisedTensor(StoredTensor):
    """``shape`` is that of the values; ``dtype`` 'float8_e4m3fn' or 'mxfp4'.

    block      (rows, columns) that share one of the ``scales``
    part_rows  scales start anew after this many rows: tensors that are stored sharded
    raw        the stored values without their scales
    """

    scales: StoredTensor | None = None
    raw: StoredTensor | None = None
    block: tuple[int, int] = (1, 1)
    part_rows: int = 0
    name: str = ""

    def _read_rows(self, start: int, stop: int) -> Tensor:
        packed = self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        scales = self.read_scales(start, stop)  # [stop - start, column blocks]
        if self.dtype != FP8:
            return dequantise_mxfp4(packed.view(stop - start, -1), scales)
        return scale_columns(decode_e4m3(packed).view(stop - start, -1), scales, self.block[1])

    def read_scales(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, column blocks], one line per row. CheckpointError for a scale that is not a
        number or negative."""
        rows = self._scale_row(torch.arange(start, stop))
        first, last = int(rows[0]), int(rows[-1]) + 1
        found = self.stored_scales(first, last)
        return found.index_select(0, rows - first)

    def stored_scales(self, first: int, last: int) -> Tensor:
        """Lines ``first`` to ``last`` of the scales as stored, float32."""
        assert self.scales is not None
        stored = self.scales
        columns = max(prod(stored.shape[1:]), 1)
        line_bytes = stored.nbytes // max(stored.num_rows, 1)
        raw = stored.file.read(stored.offset + first * line_bytes, (last - first) * line_bytes)
        found = decode_e8m0(raw) if stored.dtype in POWERS else raw.view(getattr(torch, stored.dtype)).float()
        found = found.view(last - first, columns)
        if not (torch.isfinite(found) & (found >= 0)).all():
            bad = found[~(torch.isfinite(found) & (found >= 0))][0].item()
            raise CheckpointError(
                f"{stored.file.path}: the scales of tensor {shorten(self.name)!r} hold {bad}; every "
                "scale must be a finite number, and not negative. The file is damaged: fetch it again"
            )
        return found

    def _scale_row(self, rows: Tensor) -> Tensor:
        if not self.part_rows:
            return rows // self.block[0]
        blocks = -(-self.part_rows // self.block[0])
        return rows // self.part_rows * blocks + rows % self.part_rows // self.block[0]


def join_scales(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """``tensors`` with every quantised weight and its scales as one; as they are for a ``spec`` without
    quantisation.

    Raises CheckpointError naming the tensor: scales are missing, have the wrong shape or dtype, or have no
    weight.
    """
    if spec.quant is None:
        return dict(tensors)
    scales = {name: weight for name in tensors if (weight := _weight_of(name)) is not None}
    by_weight = {weight: name for name, weight in scales.items()}
    joined: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name in scales:
            _check_has_weight(name, scales[name], tensors)
        elif not name.endswith(UNUSED_SUFFIXES):
            joined[name] = _joined(name, tensor, tensors.get(by_weight.get(name, "")), spec)
    return joined


def _weight_of(name: str) -> str | None:
    for suffix in SCALE_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ".weight"
    return None


def _check_has_weight(name: str, weight: str, tensors: Mapping[str, StoredTensor]) -> None:
    found = tensors.get(weight)
    if found is None or found.dtype not in (FP8, *BYTES):
        what = "no such tensor" if found is None else f"one of {found.dtype}"
        raise CheckpointError(
            f"{tensors[name].file.path}: tensor {shorten(name)!r} holds the scales of {shorten(weight)!r}, "
            f"but there is {what}; expected quantised values (F8_E4M3, or I8 or U8 for MXFP4)"
        )


def _joined(name: str, tensor: StoredTensor, scales: StoredTensor | None, spec: ModelSpec) -> StoredTensor:
    if tensor.dtype == FP8:
        if scales is None:
            _no_scales(name, tensor)
        return _fp8(name, tensor, scales, spec)
    if tensor.dtype in BYTES and len(tensor.shape) == 2 and name.endswith(".weight"):
        if scales is None:
            _no_scales(name, tensor)
        return _mxfp4(name, tensor, scales)
    return tensor


def _no_scales(name: str, tensor: StoredTensor) -> NoReturn:
    stem = name.removesuffix(".weight")
    wanted = " or ".join(repr(shorten(stem) + suffix) for suffix in SCALE_SUFFIXES)
    raise CheckpointError(
        f"{tensor.file.path}: tensor {shorten(name)!r} is quantised ({tensor.dtype}), but its scales "
        f"are missing; expected a tensor named {wanted}"
    )


def _fp8(name: str, tensor: StoredTensor, scales: StoredTensor, spec: ModelSpec) -> QuantisedTensor:
    where = f"{tensor.file.path}: tensor {shorten(name)!r}"
    if len(tensor.shape) != 2:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}; quantised weights have two dimensions"
        )
    if not scales.floating and scales.dtype not in POWERS:
        raise _wrong_dtype(where, scales, "F32, BF16, F16 or F8_E8M0")
    assert spec.quant is not None
    rows, columns = tensor.shape
    if spec.quant.block is None and prod(scales.shape) == 1:
        return _quantised(name, tensor, scales, tensor.shape, FP8, (max(rows, 1), max(columns, 1)), 0)
    block = spec.quant.block or (1, max(columns, 1))  # without blocks: one scale per tensor, or per row
    column_blocks = -(-columns // block[1])
    parts = _parts(name, rows, spec)
    in_parts = (parts * -(-(rows // parts) // block[0]), column_blocks)
    if parts > 1 and tuple(scales.shape) == in_parts:
        return _quantised(name, tensor, scales, tensor.shape, FP8, block, rows // parts)
    expected = (-(-rows // block[0]), column_blocks)
    if tuple(scales.shape) != expected:
        raise CheckpointError(
            f"{where} of shape {list(tensor.shape)} has scales of shape {list(scales.shape)}; blocks of "
            f"{block[0]}x{block[1]} need {list(expected)}. config.json may describe another release"
        )
    return _quantised(name, tensor, scales, tensor.shape, FP8, block, 0)


def _parts(name: str, rows: int, spec: ModelSpec) -> int:
    """Ranks that a fused projection was dealt out to before its shares were quantised one by one."""
    parts = spec.fused_qkv if name.endswith(".qkv_proj.weight") else 0
    return parts if parts and rows % parts == 0 else 1


def _mxfp4(name: str, tensor: StoredTensor, scales: StoredTensor) -> QuantisedTensor:
    where = f"{tensor.file.path}: tensor {shorten(name)!r}"
    rows, columns = tensor.shape[0], 2 * tensor.shape[1]
    if scales.dtype not in POWERS:
        raise _wrong_dtype(where, scales, "F8_E8M0 or U8")
    if columns % MXFP4_GROUP or tuple(scales.shape) != (rows, columns // MXFP4_GROUP):
        raise CheckpointError(
            f"{where} holds {rows}x{columns} MXFP4 values and has scales of shape {list(scales.shape)}; "
            f"groups of {MXFP4_GROUP} need {[rows, -(-columns // MXFP4_GROUP)]}"
        )
    return _quantised(name, tensor, scales, (rows, columns), MXFP4, (1, MXFP4_GROUP), 0)


def _wrong_dtype(where: str, scales: StoredTensor, expected: str) -> CheckpointError:
    return CheckpointError(f"{where} has scales of dtype {scales.dtype}; expected {expected}")


def _quantised(
    name: str,
    tensor: StoredTensor,
    scales: StoredTensor,
    shape: tuple[int, ...],
    dtype: str,
    block: tuple[int, int],
    part_rows: int,
) -> QuantisedTensor:
    return QuantisedTensor(
        file=tensor.file,
        offset=tensor.offset,
        shape=shape,
        dtype=dtype,
        row_bytes=tensor.row_bytes,
        decode=tensor.decode,
        floating=True,
        scales=scales,
        raw=tensor if dtype == FP8 else replace(tensor, decode=plain(torch.uint8)),
        block=block,
        part_rows=part_rows,
        name=name,
    )
