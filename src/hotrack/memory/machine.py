"""Everything about a device that the memory manager needs, put together once."""

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hotrack.core.errors import ConfigError
from hotrack.core.host_copies import DIRECTORY
from hotrack.memory.backend import BackendError, MmapBackend, PhysicalBackend
from hotrack.memory.cuda_backend import CHUNK_BYTES, CudaBackend
from hotrack.memory.device_process import describe_holders, device_bytes
from hotrack.memory.driver import CudaDriver, Driver
from hotrack.memory.graph_pool import GraphPool, open_graph_pool
from hotrack.memory.pinned_store import PinnedStore
from hotrack.memory.region import Region
from hotrack.memory.shared_segment import SegmentSpec, SharedSegment
from hotrack.memory.sleeper import WEIGHTS
from hotrack.memory.store import ChunkStore
from hotrack.memory.streamed import StreamedMover
from hotrack.memory.transfer import Mover, ThreadedMover


@dataclass(frozen=True, slots=True)
class Machine:
    """``device_bytes``: what the driver says that this process holds on the device, None if nobody knows.
    ``holders``: who holds its memory, for messages. ``fills_kv``: see ``Sleeper``."""

    backend: PhysicalBackend
    mover: Mover
    fills_kv: bool = False
    device_bytes: Callable[[], int | None] = lambda: None
    holders: Callable[[], str] = lambda: ""
    handles: Callable[[], Mapping[str, int]] = dict
    graph_pool: Callable[[], GraphPool | None] = lambda: None


def cpu_machine(
    make_store: Callable[[Path, int], ChunkStore],
    store_dir: Path,
    num_threads: int,
    backend: PhysicalBackend | None = None,
) -> Machine:
    """Memory of this process over ``mmap``; host copies in files of ``store_dir``."""
    return Machine(backend or MmapBackend(), ThreadedMover(partial(make_store, store_dir), num_threads))


@dataclass(frozen=True, slots=True)
class SharedCopy:
    """Name of the host copy in shared memory, and a ``key`` for everything that decides which bytes are in
    it: model files, their version, how they are converted. Layout and shapes are added to it."""

    name: str
    key: str


def cuda_machine(
    device: torch.device,
    num_threads: int,
    chunk_bytes: int | None = None,
    shared: SharedCopy | None = None,
) -> Machine:
    """A GPU; host copies in pinned memory, that of immutable weights in shared memory if wanted.

    Raises:
        ConfigError: torch has no such GPU, or it cannot be driven.
    """
    ordinal = _ordinal(device)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    target = torch.device("cuda", ordinal)
    try:
        driver = CudaDriver(ordinal)
        backend = CudaBackend(driver, target, chunk_bytes or CHUNK_BYTES)
        pinned = partial(make_pinned_store, driver, num_threads, shared)
        mover = StreamedMover(
            driver,
            pinned,
            TritonKernels(target),
            lambda: int(torch.cuda.current_stream(target).cuda_stream),
            backend.view,
        )
    except BackendError as error:
        raise ConfigError(f"{target} cannot be driven: {error}") from error
    return Machine(
        backend,
        mover,
        fills_kv=True,
        device_bytes=lambda: device_bytes(None, target),
        holders=lambda: describe_holders(target),
        handles=lambda: {"handles": backend.num_handles} | mover.counts(),
        graph_pool=lambda: open_graph_pool(target),
    )


def make_pinned_store(
    driver: Driver, num_threads: int, shared: SharedCopy | None, region: Region, directory: Path = DIRECTORY
) -> PinnedStore:
    """Pinned memory for one region; raises ConfigError. Mutable weights are nobody else's."""
    chunk_bytes, segment = region.plan.chunk_bytes, None
    if shared is not None and region.name == WEIGHTS and region.nbytes:
        layout = hashlib.sha256(repr((shared.key, region.plan)).encode()).digest()
        spec = SegmentSpec(shared.name, region.nbytes, len(region.chunks), layout)
        segment = SharedSegment(spec, directory)
    return PinnedStore(driver, region.nbytes, chunk_bytes, num_threads, segment)


def _ordinal(device: torch.device) -> int:
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch finds no CUDA device here; use --device cpu")
    count = torch.cuda.device_count()
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if ordinal >= count:
        raise ConfigError(f"--device {device}: this process sees {count} CUDA devices")
    return ordinal


class TritonKernels:
    """The ``DeviceKernels`` of ``StreamedMover``."""

    def __init__(self, device: torch.device) -> None:
        # Triton is there only with a CUDA build of torch.
        self._add = importlib.import_module("hotrack.kernels.triton_ops.checksum").add_checksum
        self._pull = importlib.import_module("hotrack.kernels.triton_ops.pull").pull
        self._device = device
        self._streams: dict[int, torch.cuda.ExternalStream] = {}

    def checksum(self, stream: int, data: Tensor, slots: Tensor, slot: int) -> None:
        with torch.cuda.stream(self._stream(stream)):
            self._add(data.view(torch.int64), slots[slot : slot + 1])

    def pull(self, stream: int, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(stream)):
            self._pull(target.view(torch.int64), source.view(torch.int64))

    def _stream(self, stream: int) -> torch.cuda.ExternalStream:
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
                stream, device=self._device
            )
        return self._streams[stream]
