"""Torch's side of a graph pool, without a GPU."""

import ctypes

from hotrack.memory.graph_pool import GraphPool


class TorchAllocator:
    """Calls the pool's allocator as torch does."""

    def __init__(self, pool: GraphPool) -> None:
        library = pool._library
        self._malloc = library[f"hotrack_malloc_{pool._index}"]
        self._malloc.restype = ctypes.c_void_p
        self._malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._free = library[f"hotrack_free_{pool._index}"]
        self._free.restype = None
        self._free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

    def malloc(self, nbytes: int, device: int = 0) -> int | None:
        address: int | None = self._malloc(nbytes, device, None)
        return address

    def must_malloc(self, nbytes: int) -> int:
        address = self.malloc(nbytes)
        assert address is not None
        return address

    def free(self, address: int, nbytes: int = 0) -> None:
        self._free(address, nbytes, 0, None)
