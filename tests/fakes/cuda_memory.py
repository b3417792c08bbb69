"""A memory manager on the fake GPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fakes.cuda_driver import FakeDriver
from hotrack.core.host_copies import DIRECTORY
from hotrack.memory import MemoryManager
from hotrack.memory.cuda_backend import CudaBackend
from hotrack.memory.machine import Machine, SharedCopy, make_pinned_store
from hotrack.memory.pinned_store import PinnedStore
from hotrack.memory.region import Region
from hotrack.memory.streamed import StreamedMover

CHUNK = 128 << 10


class FakeCudaBackend(CudaBackend):
    def view(self, address: int, nbytes: int) -> torch.Tensor:
        return self.driver.view(address, nbytes)  # type: ignore[attr-defined, no-any-return]


def fake_machine(
    driver: FakeDriver,
    *,
    chunk_bytes: int = CHUNK,
    shared: SharedCopy | None = None,
    directory: Path = DIRECTORY,
    current_stream: Callable[[], int] = lambda: 0,
    holders: Callable[[], str] = lambda: "held by trainer (pid 7) 12.0 GiB",
) -> Machine:
    backend = FakeCudaBackend(driver, torch.device("cpu"), chunk_bytes)

    def make_store(region: Region) -> PinnedStore:
        return make_pinned_store(driver, 2, shared, region, directory)

    mover = StreamedMover(driver, make_store, driver, current_stream, driver.view)
    return Machine(
        backend,
        mover,
        fills_kv=True,
        device_bytes=lambda: driver.used,
        holders=holders,
        handles=partial(lambda: {"handles": backend.num_handles} | mover.counts()),
    )


def fake_manager(driver: FakeDriver, **options: object) -> MemoryManager:
    return MemoryManager(machine=fake_machine(driver, **options))  # type: ignore[arg-type]
