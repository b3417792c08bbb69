"""The Triton twin of ``hotrack.kernels.checksum``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _ROUNDS, _WARPS = 1024, 16, 4  # 128 KiB per program


@triton.jit(do_not_specialize_on_alignment=["total"])  # any slot of an array
def _checksum(words, total, num_words, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for step in range(ROUNDS):
        index = first + step * BLOCK + lane
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
        x = word + (index + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        sums += tl.where(inside, x.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(total, tl.sum(sums, axis=0))


def add_checksum(data: Tensor, total: Tensor) -> None:
    """Adds the checksum of ``data`` (int64 [n], the words) to ``total`` (int64 [1]), modulo 2**64, on torch's
    current stream. Does not wait."""
    num_words = data.numel()
    if num_words:
        grid = (triton.cdiv(num_words, _BLOCK * _ROUNDS),)
        with torch.cuda.device(data.device):
            _checksum[grid](data, total, num_words, BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=_WARPS)
