"""A memory manager with weights of all shapes, whose backend and store fail when told to."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fakes.memory import Faults, FaultyBackend, FaultyStore
from hotrack.core.lifecycle import EngineState
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import MemoryManager

CHUNK = 64 << 10
SPECS = [
    TensorSpec("embed", (300, 128), "bfloat16"),
    TensorSpec("empty", (0, 7), "float32"),
    TensorSpec("scalar", (), "float32"),
    TensorSpec("norm", (577,), "bfloat16"),
    TensorSpec("big", (101, 1013), "float32"),
    TensorSpec("bytes", (3,), "uint8"),
    TensorSpec("slots", (33,), "int64"),
]
MUTABLE = ("slots",)


class Engine:
    """A manager with filled weights and a KV cache, and what they should hold."""

    def __init__(self, store_dir: Path, *, packed: bool = False, **options: object) -> None:
        self.faults = Faults()
        self.backend = FaultyBackend(self.faults, CHUNK)
        self.memory = MemoryManager(
            store_dir=store_dir,
            backend=self.backend,
            make_store=partial(FaultyStore, self.faults),
            **options,  # type: ignore[arg-type]
        )
        self.weights = self.memory.allocate_weights(SPECS, mutable=MUTABLE)
        self.kv = self.memory.allocate_bytes("kv_cache", 3 * CHUNK + 5)
        self.workspace = self.memory.allocate_bytes("workspace", 10)
        self.addresses = {name: t.data_ptr() for name, t in self.weights.items()}
        self.load()
        self.expected = {name: t.clone() for name, t in self.weights.items()}
        self.kv.fill_(9)
        self.memory.reload = self.load
        self.copies: dict[str, Tensor] = {}
        self.packs = packed
        if packed:
            self.memory.packed = self
        self.memory.seal()
        if packed:
            self.pack(list(self.weights))

    def load(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for tensor in self.weights.values():
            raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).copy_(raw)

    # PackedCopies
    def drop(self) -> None:
        self.copies.clear()

    def pack(self, names: Sequence[str]) -> None:
        for name in names:
            self.copies[name] = self.weights[name].clone()
        self.memory.drop_pages([name for name in names if name == "big"])

    def check_weights(self) -> None:
        for name, tensor in self.weights.items():
            assert tensor.data_ptr() == self.addresses[name]
            if self.packs:
                assert same_bytes(self.copies[name], self.expected[name]), name
            if not (self.packs and name == "big"):
                assert same_bytes(tensor, self.expected[name]), name

    def check_awake(self, *, kv: int) -> None:
        assert not self.memory.is_sleeping
        assert self.memory.state is EngineState.AWAKE
        self.check_weights()
        assert torch.equal(self.kv, torch.full_like(self.kv, kv))

    def check_asleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        assert self.memory.sleeping_tags == tags
        assert self.memory.state is EngineState.ASLEEP
        self.faults.arm(None)
        for region in self.memory.regions:
            if region.tag in tags:
                assert region.resident_bytes() == 0
        if "weights" in tags:
            assert not self.copies


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Bit equality: random bytes are often NaN."""
    a, b = a.contiguous().view(-1), b.contiguous().view(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True
