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

PIECE_BYTES = 512 << 20  # what one thread touches and registers at a time


class PinnedStore:
    """``nbytes`` of registered memory, page-rounded and no more; zeros at first.

    Touched first, then registered, both by several threads: that is many times faster than letting the driver
    allocate. No copy may cross a multiple of ``chunk_bytes``: pieces are registered one by one, and the
    driver refuses a copy that spans two.

    ``digests``: checksum per chunk, by its offset, for whoever moves chunks. ``data``: uint8 [nbytes] on the
    CPU, not to be touched after ``close``.

    Raises:
        ConfigError: this machine has not got that much memory, or the driver may not pin it.
    """

    def __init__(
        self,
        driver: Driver,
        nbytes: int,
        chunk_bytes: int,
        num_threads: int,
        memory: HostMemory | None = None,
    ) -> None:
        self._driver = driver
        self._pieces: list[int] = []
        self.digests: dict[int, int] = {}
        self.nbytes = nbytes
        if memory is None:
            available = process.available_bytes()
            if nbytes > available:
                raise ConfigError(
                    f"the host copy of the weights needs {nbytes} bytes of memory and {available} are "
                    "available: free some, use a smaller model, or start without --enable-sleep-mode"
                )
            memory = HostMemory(nbytes)
        self._memory = memory
        self.address = memory.address
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

    def close(self) -> None:
        """Nothing may be copying from or to it any more."""
        while self._pieces:
            self._driver.host_unregister(self._pieces[-1])
            self._pieces.pop()
        self.nbytes = 0
        self._memory.close()
