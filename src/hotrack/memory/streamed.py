"""The way of a GPU: one thread queues copies and checksums, and the device does the rest by itself."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hotrack.memory.driver import Driver, DriverError
from hotrack.memory.pinned_store import PIECE_BYTES, PinnedStore
from hotrack.memory.region import Part, Region, tensor_at
from hotrack.memory.store import HostStore, StoreCorruptError
from hotrack.memory.transfer import ChunkError, HostBuffer, Timings, make_accessible

MAX_CHUNKS = 1 << 15  # in one transition; a digest is 8 bytes
PULLED_SHARE = 0.2
"""The first bytes of a wake. After another member gave memory back, the driver clears it with the copy
engines: copies run at half their speed for as long as a fifth of a wake of as many bytes takes, and kernels
that read pinned memory at 0.92 of a copy's, whether the engines are busy or not (H200; docs/log.md)."""


class DeviceKernels(Protocol):
    def checksum(self, stream: int, data: Tensor, slots: Tensor, slot: int) -> None:
        """Queue on ``stream``: add the checksum of ``data``, uint8 [n] on the device, to ``slots[slot]``
        (int64)."""

    def pull(self, stream: int, target: Tensor, source: Tensor) -> None:
        """Queue on ``stream``: copy ``source``, uint8 [n] in pinned memory, to ``target`` on the device,
        without a copy engine; n % 8 == 0."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A chunk on its way. Its place in the queue is its event and its digest slot. ``record``: the digest is
    to be kept, not compared."""

    region: Region
    index: int
    store: PinnedStore
    record: bool


class StreamedMover:
    """Three streams: *copies*, in order; *checks*, a checksum behind every copy into an array of digests that
    comes to the host at the end; *zeros*, which overlap both.

    All calls from one thread at a time. ``current_stream``: the stream that the caller computes on.
    ``slots_view``: an int64 tensor over device memory.
    """

    asynchronous = True

    def __init__(
        self,
        driver: Driver,
        make_store: Callable[[Region], PinnedStore],
        kernels: DeviceKernels,
        current_stream: Callable[[], int],
        view: Callable[[int, int], Tensor],
    ) -> None:
        self._driver = driver
        self._make_store = make_store
        self._kernels = kernels
        self._current_stream = current_stream
        self._copies, self._checks, self._zeros = (driver.stream_create() for _ in range(3))
        self._events: list[int] = []
        self._cleared = driver.event_create()
        self._clearing = False
        self._queue: list[_Queued] = []
        self._last_slot: dict[str, int] = {}
        self._started = 0.0
        nbytes = 8 * MAX_CHUNKS
        self._digests_address = driver.mem_alloc(nbytes)
        self._digests = view(self._digests_address, nbytes).view(torch.int64)
        self._landing = PinnedStore(driver, nbytes, nbytes, 1)
        self._asked: dict[Region, set[str]] = {}
        self._complete: dict[Region, set[str]] = {}
        self._filled: dict[Region, set[int]] = {}

    def make_store(self, region: Region) -> PinnedStore:
        self._forget(region)
        return self._make_store(region)

    # -- loading

    def loading(self, region: Region, store: HostStore | None, name: str) -> Tensor:
        if store is None or not region.nbytes:
            return region.tensor(name)
        self._asked.setdefault(region, set()).add(name)
        _pinned(store).begin()
        return tensor_at(_pinned(store).view(0, store.nbytes), region.placement(name))

    def loaded(self, region: Region, store: HostStore | None, name: str) -> None:
        if store is None or name not in self._asked.get(region, ()):  # the device's bytes are the right ones
            return
        complete = self._complete.setdefault(region, set())
        complete.add(name)
        done = self._filled.setdefault(region, set())
        with self._all_or_nothing():
            for index in region.chunks_of(name):
                if index not in done and complete.issuperset(region.names_in(index)):
                    self._upload(region, index, _pinned(store))

    def fill(self, region: Region, store: HostStore) -> None:
        pinned = _pinned(store)
        with self._all_or_nothing():
            if pinned.attached:  # by another process: this is the first look at it
                for index in range(len(region.chunks)):
                    self._enqueue(region, index, pinned, "uploading", record=False)
            else:
                self._fill(region, pinned)
            if region.chunks:
                self._pull_once(region, pinned)
            self.finish(Timings())
        pinned.publish()
        self._forget(region)

    def _fill(self, region: Region, pinned: PinnedStore) -> None:
        unasked = [p for p in region.plan.placements if p.spec.name not in self._asked.get(region, ())]
        try:
            self._driver.context_synchronize()  # whatever wrote them
            for placement in unasked:  # written on the device: the store has not got them
                for index in region.chunks_of(placement.spec.name):  # see PinnedStore
                    offset, nbytes = region.chunks[index]
                    low, high = max(offset, placement.offset), min(offset + nbytes, placement.end)
                    self._driver.copy_to_host(
                        pinned.address + low, region.chunk_address(0) + low, high - low, self._copies
                    )
        except DriverError as error:
            raise ChunkError(region, 0, "saving", error) from error
        for index in range(len(region.chunks)):
            if index not in self._filled.get(region, ()):
                self._upload(region, index, pinned)

    def _pull_once(self, region: Region, pinned: PinnedStore) -> None:
        """The first pull of a process compiles and loads its kernel: 90 ms, and not in the first wake."""
        offset, nbytes = region.chunks[0]
        try:
            self._kernels.pull(
                self._copies, region.bytes_view[offset : offset + nbytes], pinned.view(offset, nbytes)
            )
            self._driver.stream_synchronize(self._copies)
        except DriverError as error:
            raise ChunkError(region, 0, "pulling", error) from error

    def save(self, part: Part, store: HostStore) -> None:
        self.quiesce()
        with self._all_or_nothing():
            for index in part.indices:
                self._enqueue(part.region, index, _pinned(store), "saving", record=True)
            self.finish(Timings())

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A failure leaves nothing on its way, so that the caller may give memory back or try again."""
        try:
            yield
        except BaseException:
            self._filled.clear()
            with suppress(DriverError):  # the first error says more
                self.quiesce()
            raise

    # -- waking

    def restore(self, part: Part, store: HostStore, spent: Timings) -> Generator[list[str], None, None]:
        region, slots = part.region, {}
        nbytes = sum(region.chunks[index][1] for index in part.indices)
        to_pull = 0 if self._queue else round(PULLED_SHARE * nbytes)
        for index in part.indices:
            start = time.perf_counter()
            make_accessible(region, index)
            spent.map_s += time.perf_counter() - start
            slots[index] = len(self._queue)
            action = "copying" if spent.copied_bytes >= to_pull else "pulling"
            self._enqueue(region, index, _pinned(store), action, record=False)
            spent.copied_bytes += region.chunks[index][1]
        for placement in region.plan.placements:
            name = placement.spec.name
            pending = [slots[index] for index in region.chunks_of(name) if index in slots]
            if pending:
                self._last_slot[name] = pending[-1]
        yield from ()

    def _upload(self, region: Region, index: int, store: PinnedStore) -> None:
        self._filled.setdefault(region, set()).add(index)
        self._enqueue(region, index, store, "uploading", record=True)

    def _enqueue(self, region: Region, index: int, store: PinnedStore, action: str, *, record: bool) -> None:
        """Queue the copy of a mapped chunk and its checksum. ``action``: what an error says was going on;
        "saving" copies from the device, "pulling" lets a kernel copy."""
        assert len(self._queue) < MAX_CHUNKS, f"more than {MAX_CHUNKS} chunks in one transition"
        slot, driver = len(self._queue), self._driver
        offset, nbytes = region.chunks[index]
        address, host = region.chunk_address(index), store.address + offset
        data = region.bytes_view[offset : offset + nbytes]
        try:
            if slot == 0:
                self._started = time.perf_counter()
                driver.fill_zero(self._digests_address, 8 * MAX_CHUNKS, self._checks)
            if slot == len(self._events):
                self._events.append(driver.event_create())
            # In the queue before anything is on its way: a failure below leaves nothing behind unnoticed.
            self._queue.append(_Queued(region, index, store, record))
            if action == "saving":
                driver.copy_to_host(host, address, nbytes, self._copies)
            elif action == "pulling":
                self._kernels.pull(self._copies, data, store.view(offset, nbytes))
            else:
                driver.copy_to_device(address, host, nbytes, self._copies)
            driver.event_record(self._events[slot], self._copies)
            driver.stream_wait_event(self._checks, self._events[slot])
            self._kernels.checksum(self._checks, data, self._digests, slot)
        except DriverError as error:
            raise ChunkError(region, index, action, error) from error

    def clear(self, parts: Sequence[Part]) -> None:
        for part in parts:
            try:
                for address, nbytes in part.runs():
                    self._driver.fill_zero(address, nbytes, self._zeros)
                self._driver.event_record(self._cleared, self._zeros)
            except DriverError as error:
                raise ChunkError(part.region, 0, "clearing", error) from error
            self._clearing = True

    def take(self, ranges: Sequence[tuple[int, int]]) -> HostBuffer:
        buffer = self._make_buffer(sum(nbytes for _, nbytes in ranges))
        try:
            for address, host, nbytes in _pieces(ranges, buffer.address):
                self._driver.copy_to_host(host, address, nbytes, self._copies)
            self._driver.stream_synchronize(self._copies)
        except DriverError:
            with suppress(DriverError):
                self.quiesce()
                buffer.close()
            raise
        return buffer

    def put(self, ranges: Sequence[tuple[int, int]], buffer: HostBuffer) -> None:
        assert isinstance(buffer, PinnedStore), f"{type(buffer).__name__} is not pinned"
        for address, host, nbytes in _pieces(ranges, buffer.address):
            self._driver.copy_to_device(address, host, nbytes, self._copies)
        self._driver.stream_synchronize(self._copies)

    def _make_buffer(self, nbytes: int) -> PinnedStore:
        return PinnedStore(self._driver, nbytes, PIECE_BYTES, 4)

    def wait_for(self, names: Sequence[str]) -> None:
        slots = [self._last_slot[name] for name in names if name in self._last_slot]
        if slots:  # copies are in order: the last one that is needed comes after the others
            self._driver.stream_wait_event(self._current_stream(), self._events[max(slots)])
        if self._clearing:
            self._driver.stream_wait_event(self._current_stream(), self._cleared)

    def finish(self, spent: Timings) -> None:
        queue = self._queue
        if not queue and not self._clearing:
            return
        first = queue[0] if queue else None
        try:
            if queue:
                self._driver.copy_to_host(
                    self._landing.address, self._digests_address, 8 * len(queue), self._checks
                )
                self._driver.event_synchronize(self._events[len(queue) - 1])
                landed = time.perf_counter()
                spent.copy_s += landed - self._started
                self._driver.stream_synchronize(self._checks)
                spent.verify_s += time.perf_counter() - landed
            self._driver.stream_synchronize(self._zeros)
        except DriverError as error:
            if first is None:
                raise
            raise ChunkError(first.region, first.index, "waiting for the copies from", error) from error
        found = self._landing.view(0, 8 * len(queue)).view(torch.int64).tolist()
        self._forget_queue()
        for queued, digest in zip(queue, found, strict=True):
            _settle(queued, digest % (1 << 64))

    def counts(self) -> dict[str, int]:
        """Live driver objects of the mover's own."""
        return {"streams": 3, "events": len(self._events) + 1}

    def quiesce(self) -> None:
        self._driver.context_synchronize()
        self._forget_queue()

    def _forget_queue(self) -> None:
        self._queue = []
        self._last_slot = {}
        self._clearing = False

    def _forget(self, region: Region) -> None:
        for table in (self._asked, self._complete, self._filled):
            table.pop(region, None)

    def close(self) -> None:
        driver = self._driver
        self.quiesce()
        self._landing.close()
        driver.mem_free(self._digests_address)
        for event in [*self._events, self._cleared]:
            driver.event_destroy(event)
        for stream in (self._copies, self._checks, self._zeros):
            driver.stream_destroy(stream)
        self._events = []


def _pieces(ranges: Sequence[tuple[int, int]], host: int) -> Iterator[tuple[int, int, int]]:
    """(device address, host address, bytes) of copies that stay within a registration."""
    done = 0
    for start, size in ranges:
        end, address = start + size, start
        while address < end:
            nbytes = min(end - address, PIECE_BYTES - done % PIECE_BYTES)
            yield address, host + done, nbytes
            address += nbytes
            done += nbytes


def _settle(queued: _Queued, digest: int) -> None:
    offset = queued.region.chunks[queued.index][0]
    if queued.record:
        queued.store.digests[offset] = digest
        return
    saved = queued.store.digests.get(offset)
    if saved != digest:
        wanted = "none, it was never saved" if saved is None else f"{saved:016x}"
        reason = StoreCorruptError(f"checksum is {digest:016x}, saved was {wanted}")
        raise ChunkError(queued.region, queued.index, "restoring", reason)


def _pinned(store: HostStore) -> PinnedStore:
    assert isinstance(store, PinnedStore), f"{type(store).__name__} is not pinned"
    return store
