"""Bridges until the memory layer has these."""

from typing import Any

from hotrack.memory.manager import MemoryManager


def loading(manager: MemoryManager, name: str, tensors: dict[str, Any]) -> Any:
    found = getattr(manager, "loading", None)
    return found(name) if found else tensors[name]


def manager_device_bytes(manager: MemoryManager) -> Any:
    found = getattr(manager, "device_bytes", None)
    return found() if found else None


def handles(manager: MemoryManager) -> Any:
    found = getattr(manager, "handles", None)
    return found() if found else {}


def graph_pool(manager: MemoryManager) -> Any:
    return getattr(manager, "graph_pool", None)
