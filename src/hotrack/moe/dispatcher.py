"""How token rows reach the ranks that hold their experts, and how results come back."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hotrack.distributed.tensor_parallel import TensorParallel


@dataclass(slots=True)
class Dispatched:
    """Rows this rank evaluates: x [N, D], expert ids int64 or int32 [N, k], weights float32 [N, k]."""

    x: Tensor
    topk_ids: Tensor
    weights: Tensor


class Dispatcher(Protocol):
    """``stays``: rows and sums are complete where they are, so what ``combine`` returns is its argument."""

    stays: bool

    def dispatch(self, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        """Send this rank's rows out, and receive the rows its experts must evaluate."""
        ...

    def combine(self, y: Tensor, shared: Tensor | None = None) -> Tensor:
        """y [N, D], one row per dispatched row -> [T, D], complete sums for this rank's own rows. ``shared``
        [T, D]: this rank's part of another sum over the ranks, which joins."""
        ...


class LocalDispatcher:
    """Every rank sees every token and holds some channels of every expert: rows stay, sums are reduced."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp
        self.stays = tp.size == 1

    def dispatch(self, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Dispatched:
        return Dispatched(x, topk_ids, weights)

    def combine(self, y: Tensor, shared: Tensor | None = None) -> Tensor:
        return self.tp.all_reduce(y if shared is None else y + shared)
