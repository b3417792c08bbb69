"""Peers of `hotrack bench swap`: the worker protocol of ``hotrack.memory.swap_worker`` over other allocators.

    python tools/peers/swap_peers.py "torch_memory_saver" | "torch_memory_saver, retained" | "vLLM allocator"

Same sizes, contents, fingerprints and clock as hotrack's member; only allocation, sleep and wake are the
peer's. Both peers' packages must be importable (``tools/peers/fetch_swap_peers.py`` puts them into a folder).
"""

import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hotrack.core.errors import ConfigError
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory.device_process import device_bytes
from hotrack.memory.swap_contents import exact_rss_bytes
from hotrack.memory.swap_member import SwapMember
from hotrack.memory.swap_worker import member_operations, serve

TAG = "weights"
KV_TAG = "kv_cache"


class PeerMember(SwapMember):
    """A member whose memory comes from a torch allocator; subclasses say which, and how it sleeps."""

    def allocate(self, specs: Sequence[TensorSpec], kv_bytes: int, options: dict[str, Any]) -> None:
        """``options`` are hotrack's and do not apply."""
        del options
        if self.device.type != "cuda":
            raise ConfigError(f"peers exist for cuda only, got {self.device}")
        self.weight_bytes = sum(spec.nbytes for spec in specs)
        self.tensors, self._kv = self.place(specs, kv_bytes)
        self._by_name = {spec.name: tensor for spec, tensor in zip(specs, self.tensors, strict=True)}

    def place(self, specs: Sequence[TensorSpec], kv_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
        raise NotImplementedError

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def landing(self, name: str) -> Tensor:
        return self._by_name[name]

    def landed(self, name: str) -> None:
        """Written where it stays."""

    def ready(self) -> None:
        torch.cuda.synchronize(self.device)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()  # stays on the device: neither peer's pool takes graphs here

    def sleep(self, nbytes: int | None = None) -> dict[str, Any]:
        if nbytes is not None:
            raise ConfigError("peers sleep as a whole")
        torch.cuda.synchronize(self.device)
        self.pause()
        torch.cuda.synchronize(self.device)
        return {"missing_bytes": self.weight_bytes}

    def wake(self) -> dict[str, Any]:
        """Not verified: no peer does."""
        self.resume()
        torch.cuda.synchronize(self.device)
        return {}

    def corrupt(self) -> dict[str, Any]:
        raise ConfigError("peers keep no checksums")

    def stats(self) -> dict[str, Any]:
        return {
            "rss_bytes": exact_rss_bytes(),
            "device_bytes": device_bytes(None, self.device),
            "host_bytes": None,  # seen in the machine's free memory
            "handles": {},
            "free_bytes": torch.cuda.mem_get_info(self.device)[0],
        }

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class TorchMemorySaverMember(PeerMember):
    """torch_memory_saver with pinned host copies, in the hook mode that needs no LD_PRELOAD."""

    def __init__(self, *, retain: bool) -> None:
        super().__init__()
        self._saver = importlib.import_module("torch_memory_saver").torch_memory_saver
        self._saver.hook_mode = "torch"
        self._retain = retain

    def place(self, specs: Sequence[TensorSpec], kv_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
        with self._saver.region(tag=TAG, enable_cpu_backup=True):
            tensors = [self._empty(spec.nbytes) for spec in specs]
        kv = []
        if kv_bytes:
            with self._saver.region(tag=KV_TAG):
                kv = [self._empty(kv_bytes)]
        if self._retain:
            self._saver.retain_cpu_backup = True
        return tensors, kv

    def pause(self) -> None:
        self._saver.pause()

    def resume(self) -> None:
        self._saver.resume()


@dataclass(slots=True)
class Allocation:
    """``handle``: device, bytes, address, driver handle, as the C allocator passes them."""

    handle: tuple[int, int, int, int]
    tag: str
    backup: Tensor | None = None
    asleep: bool = False

    @property
    def nbytes(self) -> int:
        return self.handle[1]

    @property
    def address(self) -> int:
        return self.handle[2]


class VllmMember(PeerMember):
    """vLLM's C allocator, driven as vLLM 0.33 does for sleep level 1.

    Sleep: for each allocation in turn, a fresh pinned tensor, a blocking copy into it, unmap and release;
    then garbage collection and emptying torch's cache. KV is dropped. Wake: collect and empty first; for each
    allocation create, map, and a blocking copy; the host copy is let go at once (torch's pinned-memory cache
    keeps it for the next sleep).
    """

    def __init__(self) -> None:
        super().__init__()
        path = _find_vllm_allocator()
        _preload_nvrtc()
        self._module = _load_extension("vllm.cumem_allocator", path)
        self._runtime = ctypes.CDLL(str(_mapped_library("libcudart")))
        self._allocations: dict[int, Allocation] = {}
        self._tag = TAG
        self._callbacks = (self._allocated, self._freed)  # the C side keeps no reference
        self._module.init_module(*self._callbacks)
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "my_malloc", "my_free")
        self._pools: list[Any] = []

    def _allocated(self, handle: tuple[int, int, int, int]) -> None:
        self._allocations[handle[2]] = Allocation(handle, self._tag)

    def _freed(self, address: int) -> tuple[int, int, int, int]:
        allocation = self._allocations.pop(address)
        torch.cuda.synchronize(allocation.handle[0])
        return allocation.handle

    def place(self, specs: Sequence[TensorSpec], kv_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
        return self._region(TAG, [spec.nbytes for spec in specs]), self._region(
            KV_TAG, [kv_bytes] if kv_bytes else []
        )

    def _region(self, tag: str, sizes: Sequence[int]) -> list[Tensor]:
        self._tag = tag
        pool = torch.cuda.memory.MemPool(self._allocator._allocator)
        self._pools.append(pool)
        with torch.cuda.memory.use_mem_pool(pool):
            return [self._empty(size) for size in sizes]

    def pause(self) -> None:
        for allocation in self._allocations.values():
            if allocation.asleep:
                continue
            if allocation.tag == TAG:
                backup = torch.empty(allocation.nbytes, dtype=torch.uint8, pin_memory=True)
                self._copy(backup.data_ptr(), allocation.address, allocation.nbytes)
                allocation.backup = backup
            self._module.python_unmap_and_release(*allocation.handle)
            allocation.asleep = True
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        for allocation in self._allocations.values():
            if not allocation.asleep:
                continue
            self._module.python_create_and_map(*allocation.handle)
            allocation.asleep = False
            if allocation.backup is not None:
                self._copy(allocation.address, allocation.backup.data_ptr(), allocation.nbytes)
                allocation.backup = None

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        code = self._runtime.cudaMemcpy(
            ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), ctypes.c_int(4)
        )  # 4: the driver finds out the direction
        if code != 0:
            raise RuntimeError(f"cudaMemcpy of {nbytes} bytes: error {code}")


def _find_vllm_allocator() -> Path:
    """Looks for the file in every ``vllm`` folder on the path, without importing vLLM."""
    for place in sys.path:
        path = Path(place) / "vllm" / "cumem_allocator.abi3.so"
        if path.exists():
            return path.resolve()
    raise ConfigError(
        "vllm/cumem_allocator.abi3.so is nowhere on sys.path; tools/peers/fetch_swap_peers.py gets it"
    )


def _load_extension(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _preload_nvrtc() -> None:
    """The allocator is linked against nvrtc, which torch opens only when it compiles something."""
    major = (torch.version.cuda or "13").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        for path in sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _mapped_library(name: str) -> Path:
    """The copy of a library that torch has loaded: a second one would have its own state."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return Path(path)
    raise ConfigError(f"torch has not loaded {name}")


PEERS: dict[str, Callable[[], PeerMember]] = {
    "torch_memory_saver": lambda: TorchMemorySaverMember(retain=False),
    "torch_memory_saver, retained": lambda: TorchMemorySaverMember(retain=True),
    "vLLM allocator": VllmMember,
}


if __name__ == "__main__":
    serve(member_operations(PEERS[sys.argv[1]]()))
