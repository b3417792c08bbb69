"""The driver calls of ``memory/graph_pool.c`` in C over host memory, with errors on demand."""

import ctypes
from pathlib import Path

from hotrack.kernels.native.compiler import build_library
from hotrack.memory.graph_pool import DRIVER_CALLS, DriverTable

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
PAGE = 2 << 20


class FakeBlocks:
    """One per process: the library behind it has global state."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build_library(Path(__file__).with_suffix(".c"))))
        self._library.fake_reset.argtypes = (ctypes.c_size_t,)
        addresses = (ctypes.cast(self._library[f"fake_{name}"], ctypes.c_void_p) for name in DRIVER_CALLS)
        self.table: DriverTable = (ctypes.c_void_p * len(DRIVER_CALLS))(*addresses)

        self._before = dict.fromkeys(("reservations", "handles", "mappings", "bytes", "contexts"), 0)

    def start(self) -> None:
        """A new test: what earlier ones broke for good and could not give back does not count."""
        self._before = dict.fromkeys(self._before, 0)
        self._before = self.counts()
        self.reset()

    def reset(self, capacity: int = 1 << 30) -> None:
        """No more errors; so much memory."""
        self._library.fake_reset(capacity + self._before["bytes"])

    def fail(self, call: str, nth: int = 1, code: int = INVALID_VALUE, *, for_good: bool = False) -> None:
        self._library.fake_fail(DRIVER_CALLS.index(call), nth, code, for_good)

    def counts(self) -> dict[str, int]:
        counts = (ctypes.c_size_t * len(self._before))()
        self._library.fake_counts(counts)
        pairs = zip(self._before.items(), counts, strict=True)
        return {name: count - before for (name, before), count in pairs}
