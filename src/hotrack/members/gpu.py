"""GPUs as the driver tells about them, through NVML: no torch, no CUDA context, and nothing imported before a
pool has a member on a GPU.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hotrack.config import env
from hotrack.core.errors import ConfigError
from hotrack.obs.log import get_logger

log = get_logger(__name__)
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_VALUE = (1 << 64) - 1  # NVML's "not available" where a binding does not make it None
MAX_DEPTH = 32


class DeviceMemory(NamedTuple):
    """Bytes of one GPU. ``used`` includes what the driver keeps for itself."""

    total: int
    used: int
    free: int


class Gpu:
    """One GPU. Every method is one or two requests to the driver (0.05 ms) and blocks for them.

    ``name``: for people, e.g. "cuda:0 (NVIDIA H200)". ``uuid`` tells GPUs apart.
    """

    def __init__(self, nvml: Any, handle: Any, device: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.name = f"{device} ({_text(nvml.nvmlDeviceGetName(handle))})"
        self.used_by = UsedDelta(lambda: self.memory().used)

    def memory(self) -> DeviceMemory:
        """Raises ConfigError when the driver does not tell any more."""
        try:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            raise ConfigError(f"{self.name}: NVML does not tell its memory: {error}") from error
        return DeviceMemory(int(found.total), int(found.used), int(found.free))

    def tree_bytes(self, root: int) -> int | None:
        """Bytes that ``root`` and its descendants hold here; None when none of them is listed, or the driver
        does not tell the bytes of one that is."""
        held = [num_bytes for pid, num_bytes in self._processes() if is_below(pid, root)]
        known = [num_bytes for num_bytes in held if num_bytes is not None]
        return sum(known) if held and len(known) == len(held) else None

    def _processes(self) -> list[tuple[int, int | None]]:
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return []
        return [(p.pid, None if p.usedGpuMemory in (None, NO_VALUE) else p.usedGpuMemory) for p in listed]


class UsedDelta:
    """Who holds what, from nothing but the device's total: what changes counts for the member that was moved
    last, be it by somebody else. For drivers and containers that do not tell bytes per process."""

    def __init__(self, used: Callable[[], int]) -> None:
        self._used = used
        self._held: dict[str, int] = {}
        self._mover = ""
        self._base = 0  # what is used without the mover

    def moving(self, name: str) -> None:
        """``name`` is about to take or give back memory; the one before has settled."""
        used = self._used()
        if self._mover:
            self._held[self._mover] = max(0, used - self._base)
        self._mover, self._base = name, used - self._held.get(name, 0)

    def held(self, name: str) -> int:
        return max(0, self._used() - self._base) if name == self._mover else self._held.get(name, 0)

    def gone(self, name: str) -> None:
        """Its process has ended."""
        self._held.pop(name, None)
        if self._mover == name:
            self._mover = ""


class Gpus:
    """The GPUs of this machine, found when first asked for."""

    def __init__(self, load: Callable[[], Any] | None = None) -> None:
        self._load = load or _load_nvml
        self._nvml: Any = None
        self._loaded = False
        self._by_uuid: dict[str, Gpu] = {}

    def find(self, device: str, environment: Mapping[str, str]) -> Gpu | None:
        """The GPU that a process with ``environment`` (on top of ours) calls ``device``: "cuda", "cuda:N".
        None when NVML is not there: then only members themselves know what they hold.

        Ordinals are taken in the order of NVML, which is CUDA's where all GPUs are of one kind or
        CUDA_DEVICE_ORDER is PCI_BUS_ID. The same GPU is the same object.

        Raises:
            ConfigError: there is no such GPU.
        """
        nvml = self._library()
        if nvml is None:
            return None
        ordinal = int(device.partition(":")[2] or 0)
        visible = environment.get(VISIBLE, env.visible_devices())
        try:
            handle = _handle(nvml, ordinal, visible)
            gpu = Gpu(nvml, handle, f"cuda:{ordinal}")
        except (nvml.NVMLError, LookupError) as error:
            shown = "not set" if visible is None else repr(visible)
            raise ConfigError(
                f"device {device}: there is no such GPU ({error}; {VISIBLE} is {shown}); "
                "nvidia-smi -L lists those of this machine"
            ) from error
        return self._by_uuid.setdefault(gpu.uuid, gpu)

    def available(self, environment: Mapping[str, str]) -> bool:
        """Is there a GPU that a process with ``environment`` may use?"""
        if self._library() is None:
            return False
        try:
            return self.find("cuda", environment) is not None
        except ConfigError:
            return False

    def _library(self) -> Any:
        if not self._loaded:
            self._loaded = True
            self._nvml = self._load()
        return self._nvml


def is_below(pid: int, root: int) -> bool:
    """Is ``pid`` the process ``root`` or one that it started? Members lead sessions of their own, so nearly
    always one system call tells."""
    try:
        if pid == root or os.getsid(pid) == root:
            return True
        for _ in range(MAX_DEPTH):
            pid = psutil.Process(pid).ppid()
            if pid in (root, 0, 1):
                return pid == root
    except (OSError, psutil.Error):
        pass
    return False


def _load_nvml() -> Any:
    """The ``pynvml`` module, initialised; None, said once, without it or without a driver."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return None
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        log.warning("GPU memory cannot be measured: nvidia-ml-py is missing; pip install nvidia-ml-py")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.warning("GPU memory cannot be measured: NVML does not start: %s", error)
        return None
    return pynvml


def _handle(nvml: Any, ordinal: int, visible: str | None) -> Any:
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(ordinal)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if "-1" in entries:
        entries = entries[: entries.index("-1")]  # CUDA stops at the first that is none
    entry = entries[ordinal]
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    return nvml.nvmlDeviceGetHandleByUUID(entry)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
