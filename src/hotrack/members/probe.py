"""How many bytes a member's processes hold, from the operating system rather than from the member."""

import asyncio
from pathlib import Path
from typing import Protocol

import psutil

KIB = 1024
COUNTED = ("RssAnon:", "RssShmem:")


class MemoryProbe(Protocol):
    async def memory_bytes(self, pid: int) -> int | None:
        """Bytes held by ``pid`` and its descendants; None when it is gone or cannot be read."""
        ...


class ProcessTreeProbe:
    """Resident anonymous and shared memory of a process tree: the device memory of a CPU member.

    File-backed pages (libraries, a checkpoint being read) are left out: the kernel takes them back when it
    likes, so they say nothing about sleep. The counters come from ``/proc/<pid>/status``, which costs no
    page walk.
    """

    async def memory_bytes(self, pid: int) -> int | None:
        return await asyncio.to_thread(tree_bytes, pid)


def tree_bytes(pid: int) -> int | None:
    """Blocking form; see ``ProcessTreeProbe``."""
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
    except psutil.Error:
        return None
    held = [process_bytes(p) for p in (pid, *(child.pid for child in children))]
    known = [num_bytes for num_bytes in held if num_bytes is not None]
    return sum(known) if held[0] is not None else None


def process_bytes(pid: int) -> int | None:
    """One process; None when it is gone or a zombie (which holds nothing and lists no counters)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ValueError):
        return None
    values = [int(line.split()[1]) for line in lines if line.startswith(COUNTED)]
    return sum(values) * KIB if values else None
