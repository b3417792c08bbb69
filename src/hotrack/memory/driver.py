"""The few calls of the CUDA driver API that regions need, with every return code checked."""

from collections.abc import Callable
from typing import Any, Protocol

from hotrack.core.errors import ConfigError
from hotrack.memory.backend import BackendError

try:
    from cuda.bindings import driver as cu
except ImportError:  # optional: without it there is no CUDA path
    cu = None

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class DriverError(BackendError):
    """A driver call did not return CUDA_SUCCESS."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name

    @property
    def out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class Driver(Protocol):
    """Addresses, handles, streams and events are integers; sizes are bytes. Everything raises DriverError.

    Calls may come from any thread and leave the thread's current device as it was. Copies and fills are
    asynchronous: their memory must stay mapped and registered until the stream has passed them.
    """

    granule_bytes: int

    def address_reserve(self, nbytes: int) -> int: ...
    def address_free(self, address: int, nbytes: int) -> None: ...
    def mem_create(self, nbytes: int) -> int: ...
    def mem_map(self, address: int, nbytes: int, handle: int) -> None: ...
    def mem_set_access(self, address: int, nbytes: int) -> None: ...
    def mem_unmap(self, address: int, nbytes: int) -> None: ...
    def mem_release(self, handle: int) -> None: ...
    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def mem_alloc(self, nbytes: int) -> int: ...
    def mem_free(self, address: int) -> None: ...
    def host_register(self, address: int, nbytes: int) -> None: ...
    def host_unregister(self, address: int) -> None: ...
    def stream_create(self) -> int:
        """One that does not wait for the legacy default stream, nor the other way round."""

    def stream_destroy(self, stream: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...
    def event_create(self) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_synchronize(self, event: int) -> None: ...
    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None: ...
    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None: ...
    def fill_zero(self, address: int, nbytes: int, stream: int) -> None: ...
    def context_synchronize(self) -> None:
        """Wait for everything on every stream of this process and device."""


class CudaDriver:
    """``cuda.bindings.driver`` on the primary context of device ``ordinal``: the one torch uses.

    Raises:
        ConfigError: cuda-bindings is not installed.
        DriverError: there is no such device, or it has no virtual memory management.
    """

    def __init__(self, ordinal: int) -> None:
        if cu is None:
            raise ConfigError(
                "memory on CUDA needs the driver's Python bindings: pip install 'hotrack[cuda]'"
            )
        self.ordinal = ordinal
        self._context: Any = None
        self._check("cuInit", cu.cuInit(0))
        device = self._check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        self._context = self._check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))
        self._context_id = int(self._context)
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        self._prop = cu.CUmemAllocationProp()
        self._prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location = location
        self._access = cu.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granule_bytes = int(
            self._call(
                cu.cuMemGetAllocationGranularity,
                self._prop,
                cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call with our context current on this thread, and put back the one that was."""
        before = self._check("cuCtxGetCurrent", cu.cuCtxGetCurrent())
        if int(before) == self._context_id:
            return self._check(function.__name__, function(*args))
        self._check("cuCtxSetCurrent", cu.cuCtxSetCurrent(self._context))
        try:
            return self._check(function.__name__, function(*args))
        finally:
            self._check("cuCtxSetCurrent", cu.cuCtxSetCurrent(before))

    @staticmethod
    def _check(call: str, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise DriverError(call, int(code), getattr(code, "name", "unknown error"))
        return values[0] if len(values) == 1 else tuple(values)

    def address_reserve(self, nbytes: int) -> int:
        return int(self._call(cu.cuMemAddressReserve, nbytes, self.granule_bytes, 0, 0))

    def address_free(self, address: int, nbytes: int) -> None:
        self._call(cu.cuMemAddressFree, address, nbytes)

    def mem_create(self, nbytes: int) -> int:
        return int(self._call(cu.cuMemCreate, nbytes, self._prop, 0))

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        self._call(cu.cuMemMap, address, nbytes, 0, handle, 0)

    def mem_set_access(self, address: int, nbytes: int) -> None:
        self._call(cu.cuMemSetAccess, address, nbytes, [self._access], 1)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        self._call(cu.cuMemUnmap, address, nbytes)

    def mem_release(self, handle: int) -> None:
        self._call(cu.cuMemRelease, handle)

    def mem_get_info(self) -> tuple[int, int]:
        free, total = self._call(cu.cuMemGetInfo)
        return int(free), int(total)

    def mem_alloc(self, nbytes: int) -> int:
        return int(self._call(cu.cuMemAlloc, nbytes))

    def mem_free(self, address: int) -> None:
        self._call(cu.cuMemFree, address)

    def host_register(self, address: int, nbytes: int) -> None:
        self._call(cu.cuMemHostRegister, address, nbytes, 0)

    def host_unregister(self, address: int) -> None:
        self._call(cu.cuMemHostUnregister, address)

    def stream_create(self) -> int:
        return int(self._call(cu.cuStreamCreate, int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def stream_destroy(self, stream: int) -> None:
        self._call(cu.cuStreamDestroy, stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call(cu.cuStreamSynchronize, stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call(cu.cuStreamWaitEvent, stream, event, 0)

    def event_create(self) -> int:
        return int(self._call(cu.cuEventCreate, int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def event_destroy(self, event: int) -> None:
        self._call(cu.cuEventDestroy, event)

    def event_record(self, event: int, stream: int) -> None:
        self._call(cu.cuEventRecord, event, stream)

    def event_synchronize(self, event: int) -> None:
        self._call(cu.cuEventSynchronize, event)

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._call(cu.cuMemcpyHtoDAsync, address, host, nbytes, stream)

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._call(cu.cuMemcpyDtoHAsync, host, address, nbytes, stream)

    def fill_zero(self, address: int, nbytes: int, stream: int) -> None:
        self._call(cu.cuMemsetD8Async, address, 0, nbytes, stream)

    def context_synchronize(self) -> None:
        self._call(cu.cuCtxSynchronize)
