"""Operations of the swap benchmark that use nothing of the memory layer: the figures it is compared with."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from hotrack.core.errors import ConfigError
from hotrack.memory import process
from hotrack.memory.device_process import device_bytes
from hotrack.memory.swap_contents import MIB, RandomBytes

_held: list[torch.Tensor] = []


def context(device: str) -> dict[str, Any]:
    """Make a bare context (one small allocation) and say what the device is.

    Raises:
        ConfigError: there is no such device.
    """
    target = torch.device(device)
    facts: dict[str, Any] = {"pid": os.getpid(), "torch": torch.__version__, "device_bytes": None}
    if target.type != "cuda":
        return facts | {"name": "CPU", "free_bytes": process.available_bytes(), "total_bytes": 0}
    index = target.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ConfigError(
            f"device {device}: this process sees {found} CUDA devices. Choose another with --devices, or "
            "measure the code paths without a GPU: --device cpu"
        )
    torch.cuda.set_device(target)
    torch.empty(1, device=target)
    torch.cuda.synchronize(target)
    free, total = torch.cuda.mem_get_info(target)
    return facts | {
        "name": torch.cuda.get_device_name(target),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "device_bytes": device_bytes(os.getpid(), target),
        "free_bytes": free,
        "total_bytes": total,
    }


def _driver_version() -> str | None:
    version = Path("/proc/driver/nvidia/version")
    if not version.exists():
        return None
    words = version.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def free(device: str) -> dict[str, Any]:
    """What the whole device has free."""
    target = torch.device(device)
    return {"free_bytes": torch.cuda.mem_get_info(target)[0] if target.type == "cuda" else 0}


def touch(nbytes: int) -> dict[str, Any]:
    """Touch and free host memory: the first touch of a virtual machine's memory is slow, and that is no fault
    of whoever does it. Never more than four fifths of what is available."""
    size = min(nbytes, process.available_bytes() * 4 // 5)
    torch.empty(size, dtype=torch.uint8).fill_(1)
    return {"bytes": size}


def floor(device: str, nbytes: int, piece_bytes: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of plain copies of ``nbytes`` from host memory to the device in pieces, one per repeat
    after a warm-up. With CUDA: pinned memory of the driver's own, asynchronous copies, one synchronise."""
    target = torch.device(device)
    cuda = target.type == "cuda"
    piece_bytes = min(piece_bytes, nbytes)
    ring = min(nbytes // piece_bytes, max(1, (4 << 30) // piece_bytes))  # far more than any cache
    sources = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(ring)]
    contents = RandomBytes(0, target)
    for source in sources:
        source.copy_(contents.next(piece_bytes))
    landing = torch.empty(nbytes // piece_bytes, piece_bytes, dtype=torch.uint8, device=target)
    milliseconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for index, piece in enumerate(landing):
            piece.copy_(sources[index % ring], non_blocking=True)
        if cuda:
            torch.cuda.synchronize(target)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {"bytes": landing.numel(), "milliseconds": milliseconds[1:]}


def ballast(device: str, leave_bytes: int) -> dict[str, Any]:
    """Hold device memory until only ``leave_bytes`` are free for others; replaces what was held before.

    Raises:
        ConfigError: less than that is free already.
    """
    target = torch.device(device)
    _held.clear()
    torch.cuda.empty_cache()
    torch.cuda.set_device(target)
    torch.cuda.synchronize(target)
    spare = torch.cuda.mem_get_info(target)[0] - leave_bytes
    if spare < 0:
        raise ConfigError(
            f"{device} has {spare + leave_bytes} bytes free, the benchmark needs {leave_bytes}: use a "
            "smaller --gib or an empty device"
        )
    if spare >= 2 * MIB:
        _held.append(torch.empty(spare // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device=target))
    return {
        "bytes": sum(tensor.numel() for tensor in _held),
        "free_bytes": torch.cuda.mem_get_info(target)[0],
    }


def drop_ballast(device: str) -> dict[str, Any]:
    """Give the ballast back."""
    _held.clear()
    torch.cuda.empty_cache()
    return free(device)


OPERATIONS = {
    "context": context,
    "free": free,
    "touch": touch,
    "floor": floor,
    "ballast": ballast,
    "drop_ballast": drop_ballast,
}
