"""Backends and stores that fail on demand, over the real CPU twin."""

from pathlib import Path

from torch import Tensor

from hotrack.memory.backend import BackendError, MmapBackend
from hotrack.memory.store import FileStore, StoreError


class Faults:
    """Counts calls; call number ``at`` (0-based) fails, and all later ones too if ``forever``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.at: int | None = None
        self.forever = False

    def arm(self, at: int | None, *, forever: bool = False) -> None:
        self.calls.clear()
        self.at, self.forever = at, forever

    def call(self, name: str, error: type[Exception]) -> None:
        index = len(self.calls)
        self.calls.append(name)
        if self.at is not None and (index == self.at or (self.forever and index > self.at)):
            raise error(f"injected fault in {name}")


class FaultyBackend:
    """``MmapBackend`` with small chunks and injected faults."""

    page_bytes = MmapBackend.page_bytes

    def __init__(self, faults: Faults, chunk_bytes: int) -> None:
        self.faults = faults
        self.chunk_bytes = chunk_bytes
        self._real = MmapBackend()
        self.room: int | None = None

    def reserve(self, nbytes: int) -> int:
        self.faults.call("reserve", BackendError)
        return self._real.reserve(nbytes)

    def map(self, address: int, nbytes: int) -> None:
        self.faults.call("map", BackendError)
        self._real.map(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self.faults.call("unmap", BackendError)
        self._real.unmap(address, nbytes)

    def remap(self, address: int, nbytes: int) -> None:
        self.faults.call("remap", BackendError)
        self._real.remap(address, nbytes)

    def release(self, address: int, nbytes: int) -> None:
        self.faults.call("release", BackendError)
        self._real.release(address, nbytes)

    def resident_bytes(self, address: int, nbytes: int) -> int:
        self.faults.call("resident_bytes", BackendError)
        return self._real.resident_bytes(address, nbytes)

    def available_bytes(self) -> int:
        return self._real.available_bytes() if self.room is None else self.room

    def view(self, address: int, nbytes: int) -> Tensor:
        return self._real.view(address, nbytes)


class FaultyStore(FileStore):
    """``make_store`` for MemoryManager: ``functools.partial(FaultyStore, faults)``."""

    def __init__(self, faults: Faults, directory: Path, nbytes: int) -> None:
        self.faults = faults
        super().__init__(directory, nbytes)

    def save(self, offset: int, address: int, nbytes: int) -> None:
        self.faults.call("save", StoreError)
        super().save(offset, address, nbytes)

    def restore(self, offset: int, address: int, nbytes: int) -> None:
        self.faults.call("restore", StoreError)
        super().restore(offset, address, nbytes)
