"""The host's copy of a region in memory that a GPU can read at the full speed of its link."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hotrack.core.errors import ConfigError
from hotrack.memory import process
from hotrack.memory.backend import BackendError
from hotrack.memory.driver import Driver
from hotrack.memory.host_memory import HostMemory
from hotrack.memory.shared_segment import SharedSegment

PIECE_BYTES = 512 << 20  # what one thread touches and registers at a time


class PinnedStore:
    """``nbytes`` of registered memory, page-rounded and no more; zeros at first.

    Touched first, then registered, both by several threads: that is many times faster than letting the driver
    allocate. No copy may cross a multiple of ``chunk_bytes``: pieces are registered one by one, and the
    driver refuses a copy that spans two.

    ``digests``: checksum per chunk, by its offset, for whoever moves chunks. ``data``: uint8 [nbytes] on the
    CPU, not to be touched after ``close``.

    ``segment``: the memory is this one's, and the store its owner. ``attached``: it came with sealed
    contents, which nobody has compared with their digests yet.

    Raises:
        ConfigError: this machine has not got that much memory, or the driver may not pin it.
    """

    def __init__(
        self,
        driver: Driver,
        nbytes: int,
        chunk_bytes: int,
        num_threads: int,
        segment: SharedSegment | None = None,
    ) -> None:
        self._driver = driver
        self._pieces: list[int] = []
        self.digests: dict[int, int] = {}
        self.nbytes = nbytes
        self._segment = segment
        self.attached = segment is not None and segment.digests is not None
        available = process.available_bytes()
        if nbytes > available and not self.attached:
            self._leave(remove=True)
            raise ConfigError(
                f"the host copy of the weights needs {nbytes} bytes of memory and {available} are "
                "available: free some, use a smaller model, or start without --enable-sleep-mode"
            )
        if segment is not None and segment.digests is not None:
            self.digests = {i * chunk_bytes: digest for i, digest in enumerate(segment.digests)}
        self._memory = HostMemory(nbytes) if segment is None else segment.memory
        self.address = self._memory.address
        piece = max(1, min(PIECE_BYTES, -(-nbytes // num_threads)) // chunk_bytes) * chunk_bytes
        starts = range(0, nbytes, piece)
        try:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="hotrack-pin") as pool:
                for future in [pool.submit(self._pin, s, min(piece, nbytes - s)) for s in starts]:
                    future.result()
        except (BackendError, OSError) as error:
            self.close()
            raise ConfigError(
                f"cannot pin {nbytes} bytes of host memory: {error}. Raise the limit (ulimit -l, the "
                "container's memory), or start without --enable-sleep-mode"
            ) from error
        self.data = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(self.address), dtype=torch.uint8)

    def _pin(self, start: int, nbytes: int) -> None:
        self._memory.touch(start, nbytes)
        address = self.address + start
        self._driver.host_register(address, nbytes)
        self._pieces.append(address)

    def view(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the CPU, inside the store; gone after ``close``."""
        return self.data[offset : offset + nbytes]

    @property
    def registrations(self) -> int:
        return len(self._pieces)

    def begin(self) -> None:
        """The bytes are about to be written again: what was found is not to be trusted any more."""
        if self.attached and self._segment is not None:
            self.attached = False
            self.digests = {}
            self._segment.unseal()

    def publish(self) -> None:
        """The bytes and ``digests`` are final: whoever attaches next may use them."""
        self.attached = False
        if self._segment is not None:
            self._segment.seal([self.digests[offset] for offset in sorted(self.digests)])

    def close(self) -> None:
        """Nothing may be copying from or to it any more. A shared segment is removed."""
        self._free(remove=True)

    def leave(self) -> None:
        """Like ``close``, but a shared segment stays for the next process."""
        self._free(remove=False)

    def _free(self, *, remove: bool) -> None:
        while self._pieces:
            self._driver.host_unregister(self._pieces[-1])
            self._pieces.pop()
        self.nbytes = 0
        self._memory.close()
        self._leave(remove=remove)

    def _leave(self, *, remove: bool) -> None:
        if self._segment is not None:
            self._segment.close(remove=remove)
            self._segment = None
