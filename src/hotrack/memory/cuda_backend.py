"""Chunks of a GPU's memory through CUDA's virtual memory management."""

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from hotrack.memory.backend import BackendError
from hotrack.memory.driver import Driver

CHUNK_BYTES = 128 << 20


class CudaBackend:
    """A handle per mapped or unmapped range. Unlike with ``mmap``, moves take exactly the ranges that were
    mapped, and the contents of a mapped range are undefined.

    ``device``: what ``view`` makes tensors on.
    """

    def __init__(self, driver: Driver, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.driver = driver
        self.device = device
        self.page_bytes = driver.granule_bytes
        self.chunk_bytes = chunk_bytes
        self._handles: dict[int, tuple[int, int]] = {}  # address -> handle, bytes

    def reserve(self, nbytes: int) -> int:
        return self.driver.address_reserve(nbytes)

    def map(self, address: int, nbytes: int) -> None:
        assert address not in self._handles, f"{address:#x} is mapped"
        handle = self.driver.mem_create(nbytes)
        self._handles[address] = handle, nbytes
        try:
            self.remap(address, nbytes)
        except BackendError:
            self.release(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        self._handle(address, nbytes)
        self.driver.mem_unmap(address, nbytes)

    def remap(self, address: int, nbytes: int) -> None:
        self.driver.mem_map(address, nbytes, self._handle(address, nbytes))
        try:
            self.driver.mem_set_access(address, nbytes)
        except BackendError:
            self.driver.mem_unmap(address, nbytes)
            raise

    def release(self, address: int, nbytes: int) -> None:
        self.driver.mem_release(self._handle(address, nbytes))
        del self._handles[address]

    def resident_bytes(self, address: int, nbytes: int) -> int:
        """From the handles: memory is the driver's again exactly when its handle and mapping are gone."""
        addresses = sorted(self._handles)
        inside = addresses[bisect_left(addresses, address) : bisect_left(addresses, address + nbytes)]
        return sum(self._handles[start][1] for start in inside)

    def available_bytes(self) -> int:
        return self.driver.mem_get_info()[0]

    def view(self, address: int, nbytes: int) -> Tensor:
        return device_view(address, nbytes, self.device)

    @property
    def num_handles(self) -> int:
        return len(self._handles)

    def _handle(self, address: int, nbytes: int) -> int:
        handle, size = self._handles[address]
        assert size == nbytes, f"{address:#x} holds {size} bytes, not {nbytes}"
        return handle


def device_view(address: int, nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] on ``device`` over memory that it can reach: its own or pinned memory of the host. The
    range must be there now (torch asks the driver whose it is) but need not stay. Keeps nothing alive."""
    return torch.as_tensor(_DeviceMemory(address, nbytes), device=device)


class _DeviceMemory:
    """Numba's CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
