"""A tensor-parallel group whose ranks are threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hotrack.distributed.tensor_parallel import TensorParallel

R = TypeVar("R")


class Meeting:
    """Where ``size`` threads exchange one tensor each."""

    def __init__(self, size: int) -> None:
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x.clone()
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


@dataclass(frozen=True)
class ThreadParallel(TensorParallel):
    meeting: Meeting | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.meeting.exchange(self.rank, x)).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), -1)


def run_ranks(size: int, work: Callable[[TensorParallel], R]) -> list[R]:
    """``work`` once per rank, at the same time."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadParallel(rank, size, None, meeting)), range(size)))
