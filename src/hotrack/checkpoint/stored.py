"""A tensor in a file: read in row blocks, decoded and copied into place without a second full copy."""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hotrack.core.errors import CheckpointError

BLOCK_ELEMENTS = 1 << 18  # decoded fp32 blocks of 1 MiB stay in the core's cache

Decode = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Raw bytes (uint8 [n]) of whole rows and the shape of those rows -> values of that shape, on the CPU."""


class TensorFile:
    """An open checkpoint file. Reads are positional, so any number of threads may share one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointError(f"cannot open {path}: {e.strerror}") from e
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> Tensor:
        """``nbytes`` from ``offset`` as uint8; CheckpointError when the file ends before."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        view, done = memoryview(buffer.numpy().data), 0
        while done < nbytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise CheckpointError(f"cannot read {self.path} at byte {offset + done}: {e.strerror}") from e
            if got == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done}; {nbytes - done} more are expected"
                )
            done += got
        return buffer

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``shape`` as Hugging Face sees it, ``dtype`` the torch name or GGUF type it is stored in.

    ``row_bytes`` is the size of one entry of dimension 0. ``row_group`` rows must be decoded together (1, or
    a head's rows where they are stored permuted). ``floating`` is False for integers and for formats whose
    values need a scale kept elsewhere.
    """

    file: TensorFile
    offset: int
    shape: tuple[int, ...]
    dtype: str
    row_bytes: int
    decode: Decode
    row_group: int = 1
    floating: bool = True

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def copy_into(self, dest: Tensor, select: tuple[slice, ...] = ()) -> None:
        """``dest[...] = tensor[select]``, converted, a block of rows at a time. Shapes must agree already."""
        outer, *inner = select or (slice(None),)
        start, stop, _ = outer.indices(self.num_rows)
        group = self.row_group
        row_elements = max(prod(self.shape[1:]), 1)
        step = max(BLOCK_ELEMENTS // row_elements // group, 1) * group
        target = dest if self.shape else dest.view(1)
        for row in range(start - start % group, stop, step):
            end = min(row + step, -(-stop // group) * group)
            block = self._read_rows(row, end)
            low, high = max(row, start), min(end, stop)
            part = block[(slice(low - row, high - row), *inner)]
            target[low - start : high - start].copy_(part)

    def _read_rows(self, start: int, stop: int) -> Tensor:
        raw = self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        return self.decode(raw, (stop - start, *self.shape[1:]))
