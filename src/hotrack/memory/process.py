"""This process's own memory, read from the kernel, and giving freed heap back to it."""

import ctypes
import mmap
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def rss_bytes() -> int:
    """Resident set size of this process (``/proc/self/statm``, field 2)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def available_bytes() -> int:
    """What the machine could still give without swapping (``MemAvailable``); page cache counts as
    available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable line")


def trim_heap() -> None:
    """Return free pages of the C heap to the system. Freed prepacked weights sit there: ``free`` alone
    keeps them.

    glibc only; other C libraries have no such call and nothing happens.
    """
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
