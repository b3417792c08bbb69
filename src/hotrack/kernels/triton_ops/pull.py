"""Copies in which a kernel reads the host's memory, past the copy engines."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _PROGRAMS, _WARPS = 2048, 32, 8  # few programs: whoever computes beside this needs the others


@triton.jit
def _pull(target, source, num_words, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    lane = tl.arange(0, BLOCK).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < num_words:
        index = start + lane
        inside = index < num_words
        tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)
        start += PROGRAMS * BLOCK


def pull(target: Tensor, source: Tensor) -> None:
    """Copy ``source``, int64 [n] in pinned memory of the host, to ``target``, int64 [n] on the device, on
    torch's current stream. Does not wait."""
    num_words = target.numel()
    if num_words:
        with torch.cuda.device(target.device):
            _pull[(_PROGRAMS,)](target, source, num_words, BLOCK=_BLOCK, PROGRAMS=_PROGRAMS, num_warps=_WARPS)
