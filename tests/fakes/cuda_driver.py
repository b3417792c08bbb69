"""A GPU made of host memory: it counts everything alive, fails on demand, and does nothing before it must.

Physical memory is a memfd per handle, mapped at reserved addresses, so contents follow handles and touching
unmapped memory ends the process. Queued work runs when somebody waits for it: a missing wait shows.
"""

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from hotrack.kernels.checksum import checksum
from hotrack.memory.driver import DriverError
from hotrack.memory.host_memory import MAP_FIXED, PROT_NONE, libc, map_memory, unmap_memory

GARBAGE = 0xA5
OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700
NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
}


class FakeDriver:
    """``capacity``: bytes of device memory. ``lag``: work runs only when waited for, else at once."""

    def __init__(self, capacity: int = 1 << 30, *, granule_bytes: int = 64 << 10, lag: bool = True) -> None:
        self.granule_bytes = granule_bytes
        self.capacity = capacity
        self.lag = lag
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.fail_forever = False
        self.fail_code = OUT_OF_MEMORY
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, tuple[int, int]] = {}  # handle -> fd, bytes
        self.mapped: dict[int, tuple[int, int, bool]] = {}  # address -> bytes, handle, accessible
        self.allocated: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {0: []}
        self.events: dict[int, tuple[int, int] | None] = {}  # event -> stream, position
        self.done: Counter[int] = Counter()  # stream -> operations that have run
        self.copied: list[tuple[str, int]] = []
        self.on_call: Callable[[str], None] = lambda call: None
        self._next = 100

    # -- faults

    def arm(self, at: int | None, *, forever: bool = False, code: int = OUT_OF_MEMORY) -> None:
        """Call number ``at`` from now (0-based) fails, and all later ones if ``forever``."""
        self.calls.clear()
        self.fail_at, self.fail_forever, self.fail_code = at, forever, code

    def fail_on(self, call: str, nth: int = 0) -> None:
        """The ``nth`` call of this name from now fails."""
        seen = 0

        def check(name: str) -> None:
            nonlocal seen
            if name == call:
                seen += 1
                if seen == nth + 1:
                    raise self._error(name, self.fail_code)

        self.on_call = check

    def _call(self, name: str) -> None:
        index = len(self.calls)
        self.calls.append(name)
        self.on_call(name)
        if self.fail_at is not None and (
            index == self.fail_at or (self.fail_forever and index > self.fail_at)
        ):
            raise self._error(name, self.fail_code)

    def _error(self, call: str, code: int) -> DriverError:
        return DriverError(call, code, NAMES[code])

    def counts(self) -> dict[str, int]:
        """Everything alive."""
        return {
            "handles": len(self.handles),
            "handle_bytes": sum(nbytes for _, nbytes in self.handles.values()),
            "mappings": len(self.mapped),
            "allocations": len(self.allocated),
            "registrations": len(self.registered),
            "registered_bytes": sum(self.registered.values()),
            "streams": len(self.streams),
            "events": len(self.events),
        }

    @property
    def used(self) -> int:
        return sum(nbytes for _, nbytes in self.handles.values()) + sum(self.allocated.values())

    def _id(self) -> int:
        self._next += 1
        return self._next

    # -- virtual memory

    def address_reserve(self, nbytes: int) -> int:
        self._call("address_reserve")
        address = map_memory(None, nbytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.reserved[address] = nbytes
        return address

    def address_free(self, address: int, nbytes: int) -> None:
        self._call("address_free")
        assert self.reserved.pop(address) == nbytes
        unmap_memory(address, nbytes)

    def mem_create(self, nbytes: int) -> int:
        self._call("mem_create")
        assert nbytes > 0
        assert nbytes % self.granule_bytes == 0
        if self.used + nbytes > self.capacity:
            raise self._error("mem_create", OUT_OF_MEMORY)
        fd = os.memfd_create("fake-gpu")
        os.truncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            memory[:] = bytes([GARBAGE]) * nbytes
        handle = self._id()
        self.handles[handle] = fd, nbytes
        return handle

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("mem_map")
        fd, size = self.handles[handle]
        assert size == nbytes
        assert address not in self.mapped
        assert any(start <= address and address + nbytes <= start + n for start, n in self.reserved.items())
        map_memory(address, nbytes, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, fd)
        self.mapped[address] = nbytes, handle, False

    def mem_set_access(self, address: int, nbytes: int) -> None:
        self._call("mem_set_access")
        size, handle, _ = self.mapped[address]
        assert size == nbytes
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 3) == 0
        self.mapped[address] = nbytes, handle, True

    def mem_unmap(self, address: int, nbytes: int) -> None:
        self._call("mem_unmap")
        assert self.mapped[address][0] == nbytes
        pending = {stream for stream in self.streams if self._pending(stream)}
        used = self.mapped[address][2]
        assert not (used and pending), f"unmapping with work queued on {pending}"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        map_memory(address, nbytes, PROT_NONE, flags, -1)
        del self.mapped[address]

    def mem_release(self, handle: int) -> None:
        self._call("mem_release")
        fd, _ = self.handles.pop(handle)
        assert all(other != handle for _, other, _ in self.mapped.values()), "released while mapped"
        os.close(fd)

    def mem_get_info(self) -> tuple[int, int]:
        self._call("mem_get_info")
        return self.capacity - self.used, self.capacity

    def mem_alloc(self, nbytes: int) -> int:
        self._call("mem_alloc")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = map_memory(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
        self.allocated[address] = nbytes
        return address

    def mem_free(self, address: int) -> None:
        self._call("mem_free")
        unmap_memory(address, self.allocated.pop(address))

    def host_register(self, address: int, nbytes: int) -> None:
        self._call("host_register")
        assert address % mmap.PAGESIZE == 0
        assert address not in self.registered
        self.registered[address] = nbytes

    def host_unregister(self, address: int) -> None:
        self._call("host_unregister")
        del self.registered[address]

    # -- streams

    def stream_create(self) -> int:
        self._call("stream_create")
        stream = self._id()
        self.streams[stream] = []
        return stream

    def stream_destroy(self, stream: int) -> None:
        self._call("stream_destroy")
        self._run(stream)
        del self.streams[stream]

    def stream_synchronize(self, stream: int) -> None:
        self._call("stream_synchronize")
        self._run(stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("stream_wait_event")
        recorded = self.events[event]
        self._queue(stream, lambda: self._reach(recorded))

    def event_create(self) -> int:
        self._call("event_create")
        event = self._id()
        self.events[event] = None
        return event

    def event_destroy(self, event: int) -> None:
        self._call("event_destroy")
        del self.events[event]

    def event_record(self, event: int, stream: int) -> None:
        self._call("event_record")
        self.events[event] = stream, len(self.streams[stream])

    def event_synchronize(self, event: int) -> None:
        self._call("event_synchronize")
        self._reach(self.events[event])

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._call("copy_to_device")
        self._check_host(host, nbytes)
        self.copied.append(("to device", nbytes))
        self._queue(stream, lambda: self._move(address, host, nbytes, address))

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._call("copy_to_host")
        self._check_host(host, nbytes)
        self.copied.append(("to host", nbytes))
        self._queue(stream, lambda: self._move(host, address, nbytes, address))

    def fill_zero(self, address: int, nbytes: int, stream: int) -> None:
        self._call("fill_zero")

        def fill() -> None:
            self._check_device(address, nbytes)
            ctypes.memset(address, 0, nbytes)

        self._queue(stream, fill)

    def context_synchronize(self) -> None:
        self._call("context_synchronize")
        for stream in list(self.streams):
            self._run(stream)

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        """A kernel."""
        self._call("launch")
        self._queue(stream, work)

    def _queue(self, stream: int, work: Callable[[], None]) -> None:
        self.streams[stream].append(work)
        if not self.lag:
            self._run(stream)

    def _pending(self, stream: int) -> int:
        return len(self.streams[stream]) - self.done[stream]

    def _run(self, stream: int, until: int | None = None) -> None:
        queue = self.streams[stream]
        end = len(queue) if until is None else until
        while self.done[stream] < end:
            index = self.done[stream]
            self.done[stream] += 1
            queue[index]()

    def _reach(self, recorded: tuple[int, int] | None) -> None:
        if recorded is not None:
            self._run(*recorded)

    def _move(self, target: int, source: int, nbytes: int, device: int) -> None:
        self._check_device(device, nbytes)
        ctypes.memmove(target, source, nbytes)

    def _check_device(self, address: int, nbytes: int) -> None:
        """Every byte is allocated, or mapped and accessible."""
        for start, size in self.allocated.items():
            if start <= address and address + nbytes <= start + size:
                return
        end = address + nbytes
        for start in sorted(self.mapped):
            size, _, accessible = self.mapped[start]
            if accessible and start <= address < start + size:
                address = start + size
        if address < end:
            raise self._error("work on a stream", ILLEGAL_ADDRESS)

    def _check_host(self, host: int, nbytes: int) -> None:
        """Inside one registration, as the real driver wants it."""
        inside = any(
            start <= host and host + nbytes <= start + size for start, size in self.registered.items()
        )
        assert inside, "the host side of an asynchronous copy is not in one registration"

    # -- what tensors need

    def view(self, address: int, nbytes: int) -> Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    def checksum(self, stream: int, data: Tensor, slots: Tensor, slot: int) -> None:
        """One of the ``DeviceKernels`` of a ``StreamedMover``."""

        def add() -> None:
            self._check_device(data.data_ptr(), data.numel())
            found = checksum(data)
            slots[slot] += found - (1 << 64) if found >> 63 else found

        self.launch(stream, add)

    def pull(self, stream: int, target: Tensor, source: Tensor) -> None:
        """The other."""
        address, host, nbytes = target.data_ptr(), source.data_ptr(), target.numel()
        self._check_host(host, nbytes)
        self.copied.append(("pulled", nbytes))
        self.launch(stream, lambda: self._move(address, host, nbytes, address))
