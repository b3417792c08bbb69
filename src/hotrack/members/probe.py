"""How many bytes a member's processes hold, from the kernel or the driver rather than from the member."""

import asyncio
from pathlib import Path
from typing import Protocol

import psutil

from hotrack.members.gpu import Gpu
from hotrack.obs.log import get_logger

log = get_logger(__name__)
KIB = 1024
COUNTED = ("RssAnon:", "RssShmem:")


class MemoryProbe(Protocol):
    async def memory_bytes(self, pid: int) -> int | None:
        """Bytes held by ``pid`` and its descendants; None when it is gone or cannot be read."""
        ...

    def moving(self) -> None:
        """The member is about to start, sleep, wake or end."""
        ...

    def gone(self) -> None:
        """Its process has ended."""
        ...


class ProcessTreeProbe:
    """Resident anonymous and shared memory of a process tree: the device memory of a CPU member.

    File-backed pages (libraries, a checkpoint being read) are left out: the kernel takes them back when it
    likes, so they say nothing about sleep. The counters come from ``/proc/<pid>/status``, which costs no
    page walk.
    """

    async def memory_bytes(self, pid: int) -> int | None:
        return await asyncio.to_thread(tree_bytes, pid)

    def moving(self) -> None:
        """Nothing to remember."""

    def gone(self) -> None:
        """Nothing to forget."""


class GpuProbe:
    """Bytes of a member's processes on its GPU, by process; where the driver does not tell those (another PID
    namespace, MIG), by what the device's total changed while the member moved."""

    def __init__(self, name: str, gpu: Gpu) -> None:
        self._name = name
        self._gpu = gpu
        self._blind = False  # said so
        self._listed = False  # no need of the device's total

    async def memory_bytes(self, pid: int) -> int | None:
        return await asyncio.to_thread(self._read, pid)

    def moving(self) -> None:
        if not self._listed:
            self._gpu.used_by.moving(self._name)

    def gone(self) -> None:
        self._listed = False
        self._gpu.used_by.gone(self._name)

    def _read(self, pid: int) -> int | None:
        held = self._gpu.tree_bytes(pid)
        if held is not None:
            self._listed = True
            return held
        if not self._blind:
            self._blind = True
            log.warning(
                "%s: the driver does not tell what its processes hold on %s (another PID namespace, or MIG); "
                "counting what the device's total changes while it moves",
                self._name,
                self._gpu.name,
            )
        return self._gpu.used_by.held(self._name)


def tree_bytes(pid: int) -> int | None:
    """Blocking form; see ``ProcessTreeProbe``."""
    root = process_bytes(pid)
    if root is None:
        return None
    held = [process_bytes(child) for child in descendants(pid)]
    return root + sum(num_bytes for num_bytes in held if num_bytes is not None)


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``, from the kernel's own lists: a look at every process of the machine takes
    longer than a small member's sleep."""
    found: list[int] = []
    pending = [pid]
    while pending:
        children = _children(pending.pop())
        found += children
        pending += children
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    children: list[int] = []
    for task in tasks:  # a child belongs to the thread that started it
        try:
            children += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            if task.exists():  # a kernel without these lists
                return _children_of_old_kernel(pid)
        except OSError:
            continue  # the thread has ended
    return children


def _children_of_old_kernel(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def process_bytes(pid: int) -> int | None:
    """One process; None when it is gone or a zombie (which holds nothing and lists no counters)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ValueError):
        return None
    values = [int(line.split()[1]) for line in lines if line.startswith(COUNTED)]
    return sum(values) * KIB if values else None
