"""Moving whole regions between device and host store: chunk by chunk, in order, a few chunks ahead of the
consumer."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from hotrack.memory.backend import BackendError
from hotrack.memory.region import ChunkState, Region
from hotrack.memory.store import HostStore, StoreCorruptError, StoreError

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


@dataclass(slots=True)
class Timings:
    """Seconds, summed over threads."""

    map_s: float = 0.0
    copy_s: float = 0.0
    verify_s: float = 0.0

    def add(self, other: "Timings") -> None:
        self.map_s += other.map_s
        self.copy_s += other.copy_s
        self.verify_s += other.verify_s


def save_region(region: Region, store: HostStore, num_threads: int) -> None:
    """Copy every chunk into ``store`` and record its checksum. Raises ChunkError; device memory is only
    read."""

    def save(index: int) -> None:
        offset, nbytes = region.chunks[index]
        try:
            store.save(offset, region.chunk_address(index), nbytes)
        except StoreError as error:
            raise ChunkError(region, index, "saving", error) from error

    for _ in _in_order(save, range(len(region.chunks)), num_threads):
        pass


def restore_region(
    region: Region, store: HostStore, num_threads: int, timings: Timings
) -> Generator[list[str], None, None]:
    """Map, fill and verify every chunk; yields the names of tensors as they become complete, in plan order.

    Close the iterator early only to give up: chunks already mapped stay mapped. Raises ChunkError.
    """

    def restore(index: int) -> tuple[int, Timings]:
        offset, nbytes = region.chunks[index]
        address = region.chunk_address(index)
        start = time.perf_counter()
        make_accessible(region, index)
        mapped = time.perf_counter()
        try:
            store.restore(offset, address, nbytes)
            copied = time.perf_counter()
            store.verify(offset, address, nbytes)
        except StoreError as error:
            raise ChunkError(region, index, "restoring", error) from error
        return offset + nbytes, Timings(mapped - start, copied - mapped, time.perf_counter() - copied)

    waiting = deque(region.plan.placements)
    for landed, spent in _in_order(restore, range(len(region.chunks)), num_threads):
        timings.add(spent)
        names = []
        while waiting and waiting[0].end <= landed:
            names.append(waiting.popleft().spec.name)
        if names:
            yield names
    if waiting:  # tensors of an empty region
        yield [placement.spec.name for placement in waiting]


def make_accessible(region: Region, index: int) -> None:
    """Map a released chunk, or take back an unmapped one. Raises ChunkError."""
    try:
        if region.state[index] is ChunkState.RELEASED:
            region.map_chunk(index)
        elif region.state[index] is ChunkState.UNMAPPED:
            region.remap_chunk(index)
    except BackendError as error:
        raise ChunkError(region, index, "mapping", error) from error


def map_regions(regions: Sequence[Region], timings: Timings) -> None:
    """Raises ChunkError."""
    start = time.perf_counter()
    for region, index in _chunks(regions):
        make_accessible(region, index)
    timings.map_s += time.perf_counter() - start


def unmap_regions(regions: Sequence[Region]) -> None:
    """Reversible half of sleep; nothing is lost until ``release_regions``. Raises ChunkError."""
    for region, index in _chunks(regions):
        if region.state[index] is ChunkState.MAPPED:
            try:
                region.unmap_chunk(index)
            except BackendError as error:
                raise ChunkError(region, index, "unmapping", error) from error


def release_regions(regions: Sequence[Region]) -> None:
    """Give the memory of unmapped regions back, and see that it is really gone. Raises ChunkError."""
    for region in regions:
        for index, state in enumerate(region.state):
            if state is not ChunkState.UNMAPPED:
                continue
            try:
                region.release_chunk(index)
            except BackendError as error:
                raise ChunkError(region, index, "releasing", error) from error
        _check_gone(region)
        region.forget_drops()


def _check_gone(region: Region) -> None:
    try:
        left = region.resident_bytes()
    except BackendError as error:
        raise ChunkError(region, 0, "measuring", error) from error
    if left:
        raise ChunkError(
            region, 0, "releasing", BackendError(f"{left} bytes of the region are still resident")
        )


def _chunks(regions: Iterable[Region]) -> Iterator[tuple[Region, int]]:
    return ((region, index) for region in regions for index in range(len(region.chunks)))


def _in_order(work: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Results of ``work`` in the order of ``items``, at most a few items ahead of the consumer.

    However it ends, no worker is running any more when it has ended.
    """
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hotrack-chunk") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= num_threads * _CHUNKS_PER_THREAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
