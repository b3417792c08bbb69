"""What a member of the swap benchmark holds: bytes that no codec, zero page or aliasing can make cheap, and a
fingerprint of its own, so that a check does not ask the code under test whether it is right.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import process

MIB = 1 << 20
_PIECE_WORDS = 8 << 20  # 64 MiB


def synthetic_specs(nbytes: int, tensor_bytes: int) -> list[TensorSpec]:
    """uint8 tensors of ``tensor_bytes`` that add up to ``nbytes``; only the last may be smaller."""
    sizes = [min(tensor_bytes, nbytes - start) for start in range(0, nbytes, tensor_bytes)]
    return [TensorSpec(f"t{index:05d}", (size,), "uint8") for index, size in enumerate(sizes)]


class RandomBytes:
    """A stream of random bytes; the same seed gives the same bytes on the same kind of device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def next(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], ``nbytes`` a multiple of 8, on the generator's device."""
        words = torch.empty(nbytes // 8, dtype=torch.int64, device=self._device)
        return words.random_(-(1 << 63), None, generator=self._generator).view(torch.uint8)


def fingerprint(tensor: Tensor) -> int:
    """64 bits of a contiguous tensor, on any device: the sum of its 8-byte words, each times an odd number of
    its own, modulo 2**64. One changed word always changes it, and so does nearly every exchange of two. Needs
    ``2 * _PIECE_WORDS`` words of memory."""
    data = tensor.view(-1).view(torch.uint8)
    rest = data.numel() % 8
    words = (torch.nn.functional.pad(data, (0, 8 - rest)) if rest else data).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        odd = torch.arange(
            2 * start + 1, 2 * (start + piece.numel()), 2, dtype=torch.int64, device=words.device
        )
        total += odd.mul_(piece).sum()
    return int(total.item())


def mismatches(tensors: Sequence[Tensor], wanted: Sequence[int]) -> list[int]:
    """Indices of the tensors whose fingerprint is not the wanted one."""
    return [index for index, tensor in enumerate(tensors) if fingerprint(tensor) != wanted[index]]


def exact_rss_bytes() -> int:
    """Resident set by walking the page tables: slow, but without the lag of ``process.rss_bytes``."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return process.rss_bytes()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
