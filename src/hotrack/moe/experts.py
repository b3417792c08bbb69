"""Stacked expert weights behind a slot table."""

import torch
from torch import Tensor

from hotrack.layers.base import Build, Layer
from hotrack.layers.shard import Shard, divide, span


class Experts(Layer):
    """``gate_up_proj`` [slots, 2 * I, D], ``down_proj`` [slots, D, I]; expert e lives in slot ``slot_of[e]``.

    Nothing else knows where an expert is, so moving one is a copy of its slot and a write to the table.
    """

    slot_of: Tensor

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, build: Build) -> None:
        super().__init__(build)
        self.num_experts = num_experts
        self.local = divide(intermediate_size, self.tp.size, "expert channels")
        self.gate_up_proj = self.declare(num_experts, 2 * self.local, hidden_size)
        self.down_proj = self.declare(num_experts, hidden_size, self.local)

    def shards(self, name: str) -> tuple[Shard, ...]:
        mine, rows = span(self.tp.rank, self.local), slice(None)
        found = []
        for e in range(self.num_experts):
            if name == "down_proj":
                found.append(Shard(str(e), (e,), (rows, mine)))
            else:
                found.append(Shard(f"{e}.gate", (e, slice(0, self.local)), (mine,)))
                found.append(Shard(f"{e}.up", (e, slice(self.local, 2 * self.local)), (mine,)))
        return tuple(found)

    def bind(self) -> None:
        self.slot_of = torch.arange(self.num_experts, device=self.gate_up_proj.device)

    def forward(self, x: Tensor, topk_ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, D], topk_ids int64 or int32 [T, k], weights float32 [T, k], residual [T, D] -> [T, D]"""
        return self.ops.moe_experts(
            x, self.gate_up_proj.data, self.down_proj.data, topk_ids, weights, residual, self.slot_of
        )
