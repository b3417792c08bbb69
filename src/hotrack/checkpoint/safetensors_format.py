"""safetensors folders: one file, or shards with an index. Headers are checked before a byte of data is read.

Format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then the
data, covered by the offsets without holes or overlaps (https://github.com/huggingface/safetensors#format).
"""

from functools import partial
from math import prod
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from hotrack.checkpoint.stored import Decode, StoredTensor, TensorFile
from hotrack.core.errors import CheckpointError
from hotrack.modelspec.fields import parse_json_object, read_json_object, shorten

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def open_folder(folder: Path) -> tuple[dict[str, StoredTensor], list[TensorFile]]:
    """All tensors of a model folder and their open files. Raises CheckpointError and leaves nothing open."""
    files: list[TensorFile] = []
    tensors: dict[str, StoredTensor] = {}
    weight_map = _weight_map(folder)
    try:
        for name in sorted(set(weight_map.values())) if weight_map else [_single(folder)]:
            files.append(TensorFile(folder / name))
            for tensor, stored in read_header(files[-1]).items():
                if tensor in tensors:
                    both = f"{tensors[tensor].file.path.name} and {name}"
                    raise CheckpointError(f"{folder}: tensor {shorten(tensor)!r} is in both {both}")
                tensors[tensor] = stored
        for tensor, name in weight_map.items():
            if tensor not in tensors or tensors[tensor].file.path.name != name:
                raise CheckpointError(
                    f"{folder / INDEX} places {shorten(tensor)!r} in {name}, which does not hold it"
                )
    except BaseException:
        for file in files:
            file.close()
        raise
    return tensors, files


def read_header(file: TensorFile) -> dict[str, StoredTensor]:
    """Parse and check one file's header. Raises CheckpointError on anything the format does not allow."""
    path = file.path
    if file.size < 8:
        raise CheckpointError(
            f"{path} is {file.size} bytes long: not a safetensors file, or a download cut short"
        )
    length = int.from_bytes(bytes(file.read(0, 8).numpy()), "little")
    if not 2 <= length <= min(file.size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path} has {file.size} bytes and announces a header of {length}: "
            "not a safetensors file, or a damaged one"
        )
    header = parse_json_object(bytes(file.read(8, length).numpy()), f"{path} (header)")
    header.pop("__metadata__", None)
    tensors = {name: _entry(file, 8 + length, name, entry) for name, entry in header.items()}
    position = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != position:
            what = "overlaps another tensor" if stored.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {shorten(name)!r} {what}")
        position += stored.nbytes
    if position != file.size:
        kind = "truncated" if position > file.size else "followed by bytes no tensor owns"
        raise CheckpointError(
            f"{path} is {kind}: the header describes {position} bytes, the file has {file.size}"
        )
    return tensors


def _entry(file: TensorFile, base: int, name: str, entry: object) -> StoredTensor:
    where = f"{file.path}: tensor {shorten(name)!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is described by {type(entry).__name__} instead of an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {shorten(dtype)!r}; supported are {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(
            f"{where} has shape {shorten(shape)}; at most {MAX_DIMS} natural numbers are allowed"
        )
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {shorten(offsets)}; two natural numbers are needed")
    torch_dtype = DTYPES[dtype]
    nbytes = prod(shape) * torch_dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where} of shape {shorten(shape)} and dtype {dtype} needs {shorten(nbytes)} bytes; "
            f"data_offsets {shorten(offsets)} give {shorten(offsets[1] - offsets[0])}"
        )
    rows = shape[0] if shape else 1
    return StoredTensor(
        file=file,
        offset=base + offsets[0],
        shape=tuple(shape),
        dtype=str(torch_dtype).removeprefix("torch."),
        row_bytes=nbytes // rows if rows else 0,
        decode=plain(torch_dtype),
        floating=torch_dtype in PLAIN_FLOATS,
    )


def plain(dtype: torch.dtype) -> Decode:
    """Decoder for values stored as they are."""
    return partial(_view, dtype)


def _view(dtype: torch.dtype, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    return raw.view(dtype).view(shape)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name from the index, which may not name files elsewhere; empty without one."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {shorten(tensor)!r} in {shorten(name)!r}; "
                "only plain names of .safetensors files beside the index are allowed"
            )
    return weight_map


def _single(folder: Path) -> str:
    if (folder / SINGLE).is_file():
        return SINGLE
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{folder} holds {len(found)} safetensors files but no {INDEX}")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds a pickled checkpoint, which can run code when loaded and is not supported; "
            "convert it to safetensors"
        )
    raise CheckpointError(f"{folder} holds no safetensors file (looked for {SINGLE} and {INDEX})")
