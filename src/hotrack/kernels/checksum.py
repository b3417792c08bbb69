"""A 64-bit checksum of device memory that a GPU computes at the speed of its memory.

Sum over 8-byte words i of ``finalise(word + (i + 1) * GOLDEN)`` modulo 2**64, where ``finalise`` is that of
SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014). Words may be summed
in any order, yet each counts differently at every position.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_SLICE = 1 << 17  # words: temporaries of the twin stay in the cache


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def checksum(data: Tensor) -> int:
    """uint8 [n], n % 8 == 0, contiguous, on any device -> 0 <= checksum < 2**64. Plain torch."""
    words = data.view(torch.int64)
    total = 0
    for start in range(0, words.numel(), _SLICE):
        part = words[start : start + _SLICE]
        x = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=data.device)
        x.mul_(_signed(_GOLDEN)).add_(part)
        x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX1))
        x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX2))
        x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
        total += int(x.sum().item())
    return total % (1 << 64)
