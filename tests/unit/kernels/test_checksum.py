"""The checksum of chunks: its definition, and what it must notice."""

import pytest
import torch

from hotrack.kernels.checksum import checksum

MASK = (1 << 64) - 1


def by_definition(data: bytes) -> int:
    total = 0
    for index in range(len(data) // 8):
        x = int.from_bytes(data[8 * index : 8 * index + 8], "little")
        x = (x + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        total += x ^ (x >> 31)
    return total & MASK


@pytest.mark.parametrize("nbytes", [0, 8, 16, 800, 8 * 1001])
def test_definition(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert checksum(data) == by_definition(bytes(data.tolist()))


def test_slices_do_not_show() -> None:
    """Larger than what the twin does at a time."""
    data = torch.randint(0, 256, ((1 << 20) + 8 * 77,), dtype=torch.uint8)
    assert checksum(data) == by_definition(data.numpy().tobytes())


def test_every_single_bit_and_every_exchange_shows() -> None:
    data = torch.randint(0, 256, (64,), dtype=torch.uint8)
    seen = {checksum(data)}
    for bit in range(512):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(checksum(flipped))
    for i in range(8):
        for j in range(i):
            swapped = data.view(torch.int64).clone()
            swapped[[i, j]] = swapped[[j, i]]
            seen.add(checksum(swapped.view(torch.uint8)))
    assert len(seen) == 1 + 512 + 28
    assert checksum(torch.zeros(64, dtype=torch.uint8)) != checksum(torch.zeros(72, dtype=torch.uint8))
