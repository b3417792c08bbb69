"""Device memory of processes as the driver tells it, through NVML.

``device`` is a CUDA ordinal of this process ("cuda:1", 1, a ``torch.device``) or the UUID of a GPU or MIG
slice. Ordinals count what CUDA_VISIBLE_DEVICES leaves, NVML counts every GPU; they are matched by UUID, which
needs no CUDA context. The match is remembered; a call after the first is one request to the driver.

Nothing here raises. None means that nobody knows: no NVML, a GPU or MIG slice that does not tell bytes per
process, or a process that is not listed, be it without a CUDA context or in another PID namespace.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import pynvml
except ImportError:  # nvidia-ml-py is optional
    pynvml = None


class Holder(NamedTuple):
    """``nbytes`` is None where the driver does not tell."""

    pid: int
    name: str
    nbytes: int | None


def device_bytes(pid: int | None = None, device: torch.device | str | int = 0) -> int | None:
    """Bytes that ``pid`` (default: this process) holds on ``device``, its CUDA context included."""
    pid = os.getpid() if pid is None else pid
    found = [nbytes for owner, nbytes in _processes(device) if owner == pid]
    known = [nbytes for nbytes in found if nbytes is not None]
    return sum(known) if found and len(known) == len(found) else None


def holders(device: torch.device | str | int = 0) -> list[Holder]:
    """Who holds memory of ``device``, most first; this process as well."""
    found = [Holder(pid, _name(pid), nbytes) for pid, nbytes in _processes(device)]
    return sorted(found, key=lambda holder: holder.nbytes or 0, reverse=True)


def describe_holders(device: torch.device | str | int = 0, *, limit: int = 4) -> str:
    """For the end of an error message: "held by python (pid 7) 12.0 GiB, ..."; empty if nobody knows."""
    found = holders(device)
    if not found:
        return ""
    parts = [
        f"{holder.name} (pid {holder.pid})" + (f" {holder.nbytes / 2**30:.1f} GiB" if holder.nbytes else "")
        for holder in found[:limit]
    ]
    rest = [f"{len(found) - limit} more"] if len(found) > limit else []
    return "held by " + ", ".join(parts + rest)


def _processes(device: torch.device | str | int) -> list[tuple[int, int | None]]:
    if pynvml is None:
        return []
    handle = _handle(device)
    if handle is None:
        return []
    try:
        return [(p.pid, p.usedGpuMemory) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError:
        return []


@cache
def _handle(device: torch.device | str | int) -> Any:
    """NVML's handle, good for the life of the process; None if there is none."""
    try:
        pynvml.nvmlInit()
        uuid = device if isinstance(device, str) and device.startswith(("GPU-", "MIG-")) else _uuid(device)
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except (pynvml.NVMLError, RuntimeError, AssertionError, ValueError):  # torch asserts that it has CUDA
        return None


def _uuid(device: torch.device | str | int) -> str:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"{found} is not a CUDA device")
    index = torch.cuda.current_device() if found.index is None else found.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it is gone, or not ours to see
        return "?"
