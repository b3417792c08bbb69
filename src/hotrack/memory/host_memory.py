"""Page-aligned host memory that is touched on demand and not inherited by forked children."""

import ctypes
import mmap
import os

_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23  # <sys/mman.h>
_HUGE_PAGE = 2 << 20
PROT_NONE, MAP_FIXED = 0, 0x10

libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMemory:
    """``nbytes`` of zeros at a huge page boundary; from byte ``offset`` of ``fd`` if given, which stays
    the caller's.

    Raises:
        OSError: no address space.
    """

    def __init__(self, nbytes: int, fd: int | None = None, offset: int = 0) -> None:
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._base = map_memory(None, size + _HUGE_PAGE, PROT_NONE, reserved, -1)
        self._size = size + _HUGE_PAGE
        self.address = -(-self._base // _HUGE_PAGE) * _HUGE_PAGE
        kind = reserved if fd is None else mmap.MAP_SHARED
        try:
            map_memory(
                self.address,
                size,
                mmap.PROT_READ | mmap.PROT_WRITE,
                kind | MAP_FIXED,
                -1 if fd is None else fd,
                offset,
            )
        except OSError:
            self.close()
            raise
        libc.madvise(self.address, size, _MADV_DONTFORK)
        libc.madvise(self.address, size, _MADV_HUGEPAGE)  # refused where there are none: small pages work too

    def touch(self, start: int, nbytes: int) -> None:
        """Put memory behind a range, contents as they are. Raises OSError where there is none to be had."""
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        if libc.madvise(self.address + low, start + nbytes - low, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != 22:  # EINVAL: a kernel before 5.14
            raise OSError(code, os.strerror(code))
        for offset in range(low, start + nbytes, mmap.PAGESIZE):
            byte = ctypes.c_ubyte.from_address(self.address + offset)
            byte.value = byte.value

    def close(self) -> None:
        if self._size:
            unmap_memory(self._base, self._size)
            self._size = 0


def unmap_memory(address: int, nbytes: int) -> None:
    """``munmap``."""
    libc.munmap(address, nbytes)


def map_memory(
    address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int = 0
) -> int:
    """``mmap``. Raises OSError."""
    found = libc.mmap(address, nbytes, protection, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(found)
