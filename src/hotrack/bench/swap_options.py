"""What to measure, and on whom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotrack.bench.swap_numbers import GIB, MIB
from hotrack.bench.swap_process import HOTRACK_WORKER

Report = Callable[[str, int, int], None]
"""``report(what, done, total)``: how far a phase is."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose sleep and wake is measured: a worker command that speaks the protocol of
    ``hotrack.memory.swap_worker``. ``is_peer``: bars do not apply."""

    name: str
    argv: tuple[str, ...] = HOTRACK_WORKER
    environment: Mapping[str, str] = field(default_factory=dict)
    is_peer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    """``devices``: indices; more than one means one member each, waking at the same moment. ``model``: real
    weights instead of ``nbytes`` synthetic ones. ``peer_cycles``: peers take seconds per cycle."""

    device: str
    nbytes: int
    cycles: int
    peer_cycles: int = 4
    devices: tuple[int, ...] = (0,)
    members: int = 2
    tensor_bytes: int = 64 * MIB
    chunk_bytes: int | None = None
    kv_bytes: int = 0
    graphs: int = 0
    model: str | None = None
    partial: bool = False
    touch: bool = True
    floor_repeats: int = 5
    store_dir: str | None = None

    def device_name(self, index: int = 0) -> str:
        return f"{self.device}:{self.devices[index]}" if self.device == "cuda" else self.device

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def slack_bytes(self) -> int:
        """Room beside the members for what a check needs on the device: a few tensors."""
        return min(GIB, self.nbytes // 4) + 4 * self.tensor_bytes

    def init_arguments(self, seed: int, index: int = 0) -> dict[str, Any]:
        """Of the worker's ``init``. A peer ignores ``options``."""
        options: dict[str, Any] = {}
        if self.chunk_bytes is not None:
            options["chunk_bytes"] = self.chunk_bytes
        if self.store_dir is not None:
            options["store_dir"] = self.store_dir
        return {
            "device": self.device_name(index),
            "nbytes": self.nbytes,
            "tensor_bytes": self.tensor_bytes,
            "seed": seed,
            "kv_bytes": self.kv_bytes,
            "graphs": self.graphs,
            "model": self.model,
            "options": options,
        }
