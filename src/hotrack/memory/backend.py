"""What a device must be able to do with memory; the CPU twin over ``mmap``.

A chunk goes through four moves. Sleep is two of them so that it can be undone until the last moment:

    released --map--> mapped --unmap--> unmapped --release--> released
                         ^----remap-------'
"""

import ctypes
import mmap
import os
from typing import Protocol

import torch
from torch import Tensor

from hotrack.memory import process


class BackendError(Exception):
    """A device call failed. Caught by whoever knows which region and chunk it was for; never leaves the
    package."""


class PhysicalBackend(Protocol):
    """Addresses and sizes are bytes, multiples of ``page_bytes`` (a device's granule: 4 KiB here, 2 MiB with
    CUDA).

    Every method raises BackendError when the device refuses; then the range is as it was.
    """

    page_bytes: int
    chunk_bytes: int

    def reserve(self, nbytes: int) -> int:
        """Address of a new inaccessible range without memory behind it; it is never given to anyone else
        again."""

    def map(self, address: int, nbytes: int) -> None:
        """Put zeroed memory behind a released range and make it accessible."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Make a mapped range inaccessible; the memory and its contents stay until ``release``."""

    def remap(self, address: int, nbytes: int) -> None:
        """Undo ``unmap``."""

    def release(self, address: int, nbytes: int) -> None:
        """Give the memory behind an unmapped range back to the device."""

    def resident_bytes(self, address: int, nbytes: int) -> int:
        """Bytes of the range that really occupy device memory now, as the device tells it."""

    def available_bytes(self) -> int:
        """What the device could still give to this process."""

    def view(self, address: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] tensor over a range, mapped or not."""


# Linux, <sys/mman.h>; the mmap module lacks some of these and cannot place or protect ranges.
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, mmap.PROT_READ, mmap.PROT_WRITE
_MAP_NORESERVE = 0x4000
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 4, 10, 14
_HUGE_PAGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class MmapBackend:
    """Anonymous private memory of this process. Touching a range that is not mapped ends the process
    (SIGSEGV)."""

    page_bytes = mmap.PAGESIZE
    chunk_bytes = 16 << 20

    def reserve(self, nbytes: int) -> int:
        # Huge pages make waking cheaper (fewer faults) and reading weights too (fewer TLB misses).
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _libc.mmap(None, nbytes + _HUGE_PAGE, _PROT_NONE, flags, -1, 0)
        if base is None or base == ctypes.c_void_p(-1).value:
            raise _error("mmap", nbytes)
        address = -(-base // _HUGE_PAGE) * _HUGE_PAGE
        _advise(address, nbytes, _MADV_DONTFORK)
        if nbytes >= _HUGE_PAGE:
            # A kernel without transparent huge pages refuses; small pages work as well.
            _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
        return int(address)

    def map(self, address: int, nbytes: int) -> None:
        _protect(address, nbytes, _PROT_READ | _PROT_WRITE)

    def unmap(self, address: int, nbytes: int) -> None:
        _protect(address, nbytes, _PROT_NONE)

    def remap(self, address: int, nbytes: int) -> None:
        _protect(address, nbytes, _PROT_READ | _PROT_WRITE)

    def release(self, address: int, nbytes: int) -> None:
        _advise(address, nbytes, _MADV_DONTNEED)

    def resident_bytes(self, address: int, nbytes: int) -> int:
        pages = bytearray(-(-nbytes // self.page_bytes))  # one byte per page; Linux sets bit 0 and no other
        if _libc.mincore(address, nbytes, (ctypes.c_ubyte * len(pages)).from_buffer(pages)) != 0:
            raise _error("mincore", nbytes)
        return (len(pages) - pages.count(0)) * self.page_bytes

    def available_bytes(self) -> int:
        return process.available_bytes()

    def view(self, address: int, nbytes: int) -> Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _protect(address: int, nbytes: int, protection: int) -> None:
    if _libc.mprotect(address, nbytes, protection) != 0:
        raise _error("mprotect", nbytes)


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _libc.madvise(address, nbytes, advice) != 0:
        raise _error("madvise", nbytes)


def _error(call: str, nbytes: int) -> BackendError:
    return BackendError(f"{call} of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
