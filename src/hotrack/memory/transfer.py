"""Moving regions between device and host store; the way of a CPU: a few threads, a few chunks ahead of the
consumer."""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hotrack.memory.backend import BackendError
from hotrack.memory.driver import DriverError
from hotrack.memory.region import ChunkState, Part, Region
from hotrack.memory.store import ChunkStore, HostStore, StoreCorruptError, StoreError

T = TypeVar("T")
R = TypeVar("R")

_CHUNKS_PER_THREAD = (
    2  # how far copies run ahead of the consumer: bounds what a wake holds beside packed copies
)


class ChunkError(Exception):
    """A chunk of a region could not be moved. ``corrupt``: the store's bytes are not those that were
    saved."""

    def __init__(self, region: Region, index: int, action: str, reason: Exception) -> None:
        super().__init__(
            f"{action} chunk {index + 1} of {len(region.chunks)} of region '{region.name}': {reason}"
        )
        self.corrupt = isinstance(reason, StoreCorruptError)
        self.out_of_memory = isinstance(reason, DriverError) and reason.out_of_memory


@dataclass(slots=True)
class Timings:
    """Seconds, summed over threads; bytes that were copied to the device."""

    map_s: float = 0.0
    copy_s: float = 0.0
    verify_s: float = 0.0
    copied_bytes: int = 0

    def add(self, other: "Timings") -> None:
        self.map_s += other.map_s
        self.copy_s += other.copy_s
        self.verify_s += other.verify_s
        self.copied_bytes += other.copied_bytes


class HostBuffer(Protocol):
    """Host memory for a while. ``data``: uint8 [n] on the CPU."""

    data: Tensor

    def close(self) -> None:
        """Give it back."""


@dataclass(slots=True)
class _PlainBuffer:
    data: Tensor

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)


class Mover(Protocol):
    """How a part of a region gets from the device to its store and back. Everything raises ChunkError.

    ``asynchronous``: ``restore`` returns before the bytes have landed.
    """

    asynchronous: bool

    def make_store(self, region: Region) -> HostStore:
        """Room for the bytes of a region. Raises ConfigError when the host has none."""

    def loading(self, region: Region, store: HostStore | None, name: str) -> Tensor:
        """Where to write the bytes of a tensor before ``fill``."""

    def loaded(self, region: Region, store: HostStore | None, name: str) -> None:
        """The tensor is complete: ``fill`` may start on it."""

    def fill(self, region: Region, store: HostStore) -> None:
        """All tensors are complete: bring device and store to the same bytes; keep a checksum per chunk."""

    def save(self, part: Part, store: HostStore) -> None:
        """Copy mapped chunks into the store, with their checksums; device memory is only read."""

    def restore(self, part: Part, store: HostStore, spent: "Timings") -> Generator[list[str], None, None]:
        """Map and fill chunks; yields names of tensors as they become usable, unless the mover is
        asynchronous. Close it early only to give up: chunks already mapped stay mapped."""

    def clear(self, parts: Sequence[Part]) -> None:
        """Make mapped chunks zero."""

    def take(self, ranges: Sequence[tuple[int, int]]) -> HostBuffer:
        """Copies of mapped ranges (address, bytes), one behind the other. Waits. Raises BackendError, or
        ConfigError when the host has no room."""

    def put(self, ranges: Sequence[tuple[int, int]], buffer: HostBuffer) -> None:
        """The way back. Waits. Raises BackendError."""

    def wait_for(self, names: Sequence[str]) -> None:
        """Whatever the caller computes next waits until these tensors have landed."""

    def finish(self, spent: "Timings") -> None:
        """Return when everything has landed and is verified."""

    def quiesce(self) -> None:
        """Return when nothing on the device uses any memory, and forget what was on its way."""

    def close(self) -> None:
        """Give back what the mover itself holds."""


class ThreadedMover:
    """The processor copies and compares, with ``num_threads`` threads. They stay: every thread that a process
    ever had leaves some hundred bytes of libraries' bookkeeping behind."""

    asynchronous = False

    def __init__(self, make_store: Callable[[int], ChunkStore], num_threads: int) -> None:
        self._make_store = make_store
        self._ahead = num_threads * _CHUNKS_PER_THREAD
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="hotrack-chunk")

    def make_store(self, region: Region) -> ChunkStore:
        return self._make_store(region.nbytes)

    def loading(self, region: Region, store: HostStore | None, name: str) -> Tensor:  # noqa: ARG002
        return region.tensor(name)

    def loaded(self, region: Region, store: HostStore | None, name: str) -> None:
        pass

    def fill(self, region: Region, store: HostStore) -> None:
        self.save(region.part(), store)

    def save(self, part: Part, store: HostStore) -> None:
        region = part.region

        def save(index: int) -> None:
            offset, nbytes = region.chunks[index]
            try:
                _chunk_store(store).save(offset, region.chunk_address(index), nbytes)
            except StoreError as error:
                raise ChunkError(region, index, "saving", error) from error

        for _ in _in_order(self._threads, save, part.indices, self._ahead):
            pass

    def restore(self, part: Part, store: HostStore, spent: Timings) -> Generator[list[str], None, None]:
        region = part.region

        def restore(index: int) -> tuple[int, Timings]:
            offset, nbytes = region.chunks[index]
            address = region.chunk_address(index)
            start = time.perf_counter()
            make_accessible(region, index)
            mapped = time.perf_counter()
            try:
                _chunk_store(store).restore(offset, address, nbytes)
                copied = time.perf_counter()
                _chunk_store(store).verify(offset, address, nbytes)
            except StoreError as error:
                raise ChunkError(region, index, "restoring", error) from error
            return offset + nbytes, Timings(
                mapped - start, copied - mapped, time.perf_counter() - copied, nbytes
            )

        waiting = deque(region.plan.placements)
        for landed, took in _in_order(self._threads, restore, part.indices, self._ahead):
            spent.add(took)
            names = []
            while waiting and waiting[0].end <= landed:
                names.append(waiting.popleft().spec.name)
            if names:
                yield names
        if waiting:  # tensors of an empty region, or behind the last chunk that was missing
            yield [placement.spec.name for placement in waiting]

    def clear(self, parts: Sequence[Part]) -> None:
        """The kernel gives zeroed pages."""

    def take(self, ranges: Sequence[tuple[int, int]]) -> HostBuffer:
        data = torch.empty(sum(nbytes for _, nbytes in ranges), dtype=torch.uint8)
        done = 0
        for address, nbytes in ranges:
            ctypes.memmove(data.data_ptr() + done, address, nbytes)
            done += nbytes
        return _PlainBuffer(data)

    def put(self, ranges: Sequence[tuple[int, int]], buffer: HostBuffer) -> None:
        done = 0
        for address, nbytes in ranges:
            ctypes.memmove(address, buffer.data.data_ptr() + done, nbytes)
            done += nbytes

    def wait_for(self, names: Sequence[str]) -> None:
        pass

    def finish(self, spent: Timings) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def close(self) -> None:
        self._threads.shutdown()


def _chunk_store(store: HostStore) -> ChunkStore:
    assert isinstance(store, ChunkStore), f"{type(store).__name__} does not copy chunks"
    return store


def make_accessible(region: Region, index: int) -> None:
    """Map a released chunk, or take back an unmapped one. Raises ChunkError."""
    try:
        if region.state[index] is ChunkState.RELEASED:
            region.map_chunk(index)
        elif region.state[index] is ChunkState.UNMAPPED:
            region.remap_chunk(index)
    except BackendError as error:
        raise ChunkError(region, index, "mapping", error) from error


def map_parts(parts: Sequence[Part], timings: Timings) -> None:
    """Raises ChunkError."""
    start = time.perf_counter()
    for region, index in _chunks(parts):
        make_accessible(region, index)
    timings.map_s += time.perf_counter() - start


def unmap_parts(parts: Sequence[Part]) -> None:
    """Reversible half of sleep; nothing is lost until ``release_parts``. Raises ChunkError."""
    for region, index in _chunks(parts):
        if region.state[index] is ChunkState.MAPPED:
            try:
                region.unmap_chunk(index)
            except BackendError as error:
                raise ChunkError(region, index, "unmapping", error) from error


def release_parts(parts: Sequence[Part]) -> None:
    """Give the memory of unmapped chunks back, and see that it is really gone. Raises ChunkError."""
    for part in parts:
        region = part.region
        for index in part.indices:
            if region.state[index] is not ChunkState.UNMAPPED:
                continue
            try:
                region.release_chunk(index)
            except BackendError as error:
                raise ChunkError(region, index, "releasing", error) from error
        _check_gone(part)
        if not region.awake.indices:
            region.forget_drops()


def _check_gone(part: Part) -> None:
    first = part.indices[0] if part.indices else 0
    try:
        left = part.region.resident_in(part)
    except BackendError as error:
        raise ChunkError(part.region, first, "measuring", error) from error
    if left:
        raise ChunkError(
            part.region, first, "releasing", BackendError(f"{left} bytes of the region are still resident")
        )


def _chunks(parts: Iterable[Part]) -> Iterator[tuple[Region, int]]:
    return ((part.region, index) for part in parts for index in part.indices)


def _in_order(
    threads: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """Results of ``work`` in the order of ``items``, at most ``ahead`` items ahead of the consumer.

    However it ends, nothing is running any more when it has ended.
    """
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(threads.submit(work, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        wait([future for future in pending if not future.cancel()])
