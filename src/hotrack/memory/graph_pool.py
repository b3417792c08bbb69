"""Memory of captured CUDA graphs that sleeps and wakes at the addresses the graphs know.

What is in the pool: every tensor allocated while a graph is captured with ``pool=pool.mempool.id``, or inside
``torch.cuda.use_mem_pool(pool.mempool)``: intermediate results, outputs, static inputs made there, Triton's
scratch, and the cuBLAS workspace of a stream whose first matrix product ran in there. What is not: the
graphs themselves (nodes and kernel arguments are the driver's own memory and stay), code of modules, the
context, NCCL's buffers, and anything allocated before, such as a cuBLAS workspace made by a warm-up outside.

Contents are undefined after a wake. A graph writes its intermediates before it reads them, and cuBLAS asks
nothing of its workspace; everything that is read before it is written (static inputs, semaphores, counters)
is written again by a function given to ``refill``.

The allocator is a small C library because torch calls it with its own mutex held, on any thread: a callback
into Python would wait for the interpreter lock, whose owner may be waiting for that mutex.
"""

import atexit
import ctypes
import logging
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

import torch

from hotrack.core.errors import GraphPoolUnavailableError, SleepError, TransitionError, WakeError
from hotrack.kernels.native.compiler import NativeUnavailableError, build_library
from hotrack.memory.device_process import describe_holders

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("graph_pool.c")

# In the order of struct driver in graph_pool.c.
DRIVER_CALLS = (
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuGetErrorName",
)
DriverTable = ctypes.Array[ctypes.c_void_p]

# For the life of the process: graphs that outlive their pool give their blocks back through these.
_allocators: list["torch._C._cuda_CUDAAllocator"] = []

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_OPERATIONS = ("malloc", "free", "sleep", "wake", "trim")
_REMEDY = "start without unmapped graph memory: it then stays on the device and counts as residue"


class _Error(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char * 32),
        ("name", ctypes.c_char * 64),
        ("code", ctypes.c_int),
        ("at", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    )

    def __str__(self) -> str:
        where = f" of {self.nbytes} bytes at {self.at:#x}" if self.nbytes or self.at else ""
        return f"{self.call.decode()}{where}: {self.name.decode()}"


class _Stats(ctypes.Structure):
    _fields_ = (
        ("mapped_bytes", ctypes.c_uint64),
        ("live_bytes", ctypes.c_uint64),
        ("freed_bytes", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("handles", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("asleep", ctypes.c_int),
        ("broken", ctypes.c_int),
        ("last", _Error * len(_OPERATIONS)),
    )


class GraphPool:
    """One pool of graph memory on one CUDA device. Its methods have one owner, as other transitions do; torch
    may allocate and free from any thread meanwhile.

    An allocation that needs new memory fails while the pool is asleep (torch raises OutOfMemoryError and
    ``last_error('malloc')`` says why). Freeing is always legal. Memory that torch frees goes back to the
    device at the next ``trim`` or ``sleep``: only their caller knows that no kernel uses it any more.

    Args:
        device: CUDA device; "cuda" is the current one.
        driver: the driver's functions in the order of ``DRIVER_CALLS``; libcuda's if None.
        synchronize: waits until the device is idle.

    Raises:
        GraphPoolUnavailableError: no C compiler or no driver. ``mempool`` raises it for an allocator
            configuration under which torch does not come here for memory (expandable segments, in some of
            its releases).
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        driver: DriverTable | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        driver = driver if driver is not None else driver_table()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._synchronize = synchronize or (lambda: torch.cuda.synchronize(self.device))
        self._refills: dict[str, Callable[[], None]] = {}
        self._library = _load(_library_path())
        index = self._library.hotrack_pool_open(driver, self.device.index)
        if index == -1:
            raise GraphPoolUnavailableError(
                f"this process has too many graph pools; close some, or {_REMEDY}"
            )
        self._index = index if index >= 0 else -2 - index
        if index < 0:
            raise GraphPoolUnavailableError(
                f"graph pool on {self.device}: {self.last_error('trim')}; {_REMEDY}"
            )

    @cached_property
    def mempool(self) -> torch.cuda.MemPool:
        """For ``torch.cuda.graph(g, pool=pool.mempool.id)`` and ``torch.cuda.use_mem_pool(pool.mempool)``.

        The first access allocates through a throw-away pool once, to prove that torch takes memory from here.
        """
        self._prove()
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(self.allocator)

    @cached_property
    def allocator(self) -> "torch._C._cuda_CUDAAllocator":
        """For further ``torch.cuda.MemPool``s that sleep and wake with this one."""
        allocator = torch._C._cuda_customAllocator(self.function("malloc"), self.function("free"))
        _allocators.append(allocator)
        return allocator

    def function(self, name: str) -> int:
        """Address of this pool's 'malloc' or 'free'."""
        function = self._library[f"hotrack_{name}_{self._index}"]
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def _prove(self) -> None:
        before = self._stats().blocks
        reason = "torch did not ask for it"
        try:
            with torch.cuda.device(self.device):
                pool = torch.cuda.MemPool(self.allocator)
                with torch.cuda.use_mem_pool(pool):
                    probe = torch.empty(1, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
        else:
            served = self._stats().blocks > before
            del probe, pool
            self.trim()
            if served:
                return
        raise GraphPoolUnavailableError(
            f"torch does not take graph memory from hotrack's pool: {reason}. Take expandable_segments out "
            f"of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or {_REMEDY}"
        )

    @property
    def nbytes(self) -> int:
        """Bytes torch holds, awake or asleep."""
        return int(self._stats().live_bytes)

    @property
    def mapped(self) -> bool:
        return not self._stats().asleep

    @property
    def contents_epoch(self) -> int:
        """Grows whenever contents were lost."""
        return int(self._stats().epoch)

    def handles(self) -> dict[str, int]:
        """Live driver objects and bytes, for leak tests."""
        stats = self._stats()
        return {
            "blocks": int(stats.blocks),
            "handles": int(stats.handles),
            "mapped_bytes": int(stats.mapped_bytes),
            "freed_bytes": int(stats.freed_bytes),
        }

    def blocks(self) -> list[tuple[int, int]]:
        """(address, bytes) of every block torch holds, awake or asleep."""
        count = int(self._stats().blocks)
        addresses, sizes = (ctypes.c_uint64 * count)(), (ctypes.c_uint64 * count)()
        found = int(self._library.hotrack_pool_blocks(self._index, addresses, sizes, count))
        return list(zip(addresses, sizes, strict=True))[:found]

    def last_error(self, operation: str) -> str | None:
        """What went wrong last in 'malloc', 'free', 'sleep', 'wake' or 'trim' since the pool was made."""
        stats = self._stats()
        error = stats.last[_OPERATIONS.index(operation)]
        if not error.call:
            return None
        hint = f" ({stats.freed_bytes} bytes were freed and not trimmed)" if stats.freed_bytes else ""
        return f"{error}{hint if operation == 'malloc' else ''}"

    def refill(self, name: str, fill: Callable[[], None] | None) -> None:
        """``fill`` writes something that is read before it is written; every wake calls it, in the order of
        first registration. None forgets it."""
        if fill is None:
            self._refills.pop(name, None)
        else:
            self._refills[name] = fill

    # -- transitions

    def sleep(self) -> int:
        """Wait for the device and unmap everything. Returns bytes given back; asleep already: 0.

        Raises:
            SleepError: everything is mapped; contents were lost only if ``contents_epoch`` has changed.
            TransitionError: mapping it again failed as well; the process must be restarted.
        """
        self._synchronize()
        nbytes = int(self._library.hotrack_pool_sleep(self._index))
        if nbytes < 0:
            raise self._error("sleep", SleepError)
        return nbytes

    def wake(self) -> int:
        """Map everything at its old address and run the refills. Returns bytes mapped; awake already: 0.

        Raises:
            WakeError: everything is asleep.
            TransitionError: unmapping it again failed as well; the process must be restarted.
        """
        stats = self._stats()
        if not (stats.asleep or stats.broken):
            return 0
        nbytes = int(self._library.hotrack_pool_wake(self._index))
        if nbytes < 0:
            raise self._error("wake", WakeError)
        for name, fill in self._refills.items():
            try:
                fill()
            except Exception as error:
                self._undo_wake(name, error)
                raise WakeError(f"graph memory: writing '{name}' again failed: {error}") from error
        return nbytes

    def _undo_wake(self, name: str, cause: Exception) -> None:
        try:
            self.sleep()
        except SleepError as error:
            raise TransitionError(
                f"graph memory: writing '{name}' again failed: {cause}; and so did unmapping: {error}. "
                "The engine must be restarted",
                code="memory_failed",
            ) from error

    def trim(self) -> int:
        """Wait for the device and give back what torch has freed. Returns bytes.

        Raises:
            SleepError: some of it is still there.
        """
        self._synchronize()
        nbytes = int(self._library.hotrack_pool_trim(self._index))
        if nbytes < 0:
            raise self._error("trim", SleepError)
        return nbytes

    def close(self) -> bool:
        """Give everything back; False if torch still holds blocks, because graphs are alive: try again then.
        Refills are forgotten, since what they write to may live here."""
        self._refills.clear()
        mempool = self.__dict__.get("mempool")
        if mempool is not None and mempool.use_count() > 1:
            return False
        self.__dict__.pop("mempool", None)
        del mempool
        self._synchronize()
        return bool(self._library.hotrack_pool_close(self._index))

    def _error(self, operation: str, kind: type[SleepError | WakeError]) -> TransitionError:
        message = f"graph memory on {self.device}: {self.last_error(operation)}"
        stats = self._stats()
        if stats.last[_OPERATIONS.index(operation)].code == _OUT_OF_MEMORY:
            message = "; ".join(filter(None, (message, describe_holders(self.device))))
        if not stats.broken:
            return kind(message)
        return TransitionError(
            f"{message}; moving everything back failed as well. The engine must be restarted",
            code="memory_failed",
        )

    def _stats(self) -> _Stats:
        stats = _Stats()
        self._library.hotrack_pool_stats(self._index, ctypes.byref(stats))
        return stats


def open_graph_pool(device: torch.device) -> GraphPool | None:
    """A pool that torch is known to use, or None and a line in the log that says why not."""
    pool = None
    try:
        pool = GraphPool(device)
        _ = pool.mempool
    except GraphPoolUnavailableError as error:
        _log.warning("the memory of captured graphs stays on the device in every sleep: %s", error)
        if pool is not None:
            pool.close()
        return None
    return pool


@cache
def driver_table() -> DriverTable:
    """libcuda's functions. Raises GraphPoolUnavailableError."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
        if code := libcuda.cuInit(0):
            raise GraphPoolUnavailableError(f"cuInit failed with error {code}; {_REMEDY}")
        return _table(libcuda)
    except (OSError, AttributeError) as error:
        raise GraphPoolUnavailableError(f"no usable NVIDIA driver: {error}; {_REMEDY}") from error


def _table(library: ctypes.CDLL) -> DriverTable:
    addresses = (ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in DRIVER_CALLS)
    return (ctypes.c_void_p * len(DRIVER_CALLS))(*addresses)


def _library_path() -> Path:
    try:
        return build_library(SOURCE, ("-fvisibility=hidden",))
    except NativeUnavailableError as error:
        raise GraphPoolUnavailableError(f"graph memory needs a C compiler: {error}; {_REMEDY}") from error


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise GraphPoolUnavailableError(f"cannot load {path}: {error}; {_REMEDY}") from error
    library.hotrack_pool_open.argtypes = (ctypes.c_void_p, ctypes.c_int)
    for name in ("trim", "sleep", "wake"):
        function = getattr(library, f"hotrack_pool_{name}")
        function.argtypes = (ctypes.c_int,)
        function.restype = ctypes.c_int64
    library.hotrack_pool_close.argtypes = (ctypes.c_int,)
    library.hotrack_pool_stats.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.hotrack_pool_stats.restype = None
    library.hotrack_pool_blocks.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    library.hotrack_pool_blocks.restype = ctypes.c_int64
    library.hotrack_exiting.restype = None
    atexit.register(library.hotrack_exiting)
    return library
