"""One rank's view of a tensor-parallel group. Passed in where needed; there is no process-wide state."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """``group``: a torch process group of ``size`` ranks; None when size is 1 (collectives are then
    no-ops)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place. Every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x [..., N] -> [..., size * N], ranks in order along the last dim."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Rank ``src`` of the group's values, in place on every other rank."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=src)
        return x
