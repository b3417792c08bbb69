"""This process's own memory, read from the kernel."""

import mmap
from pathlib import Path


def rss_bytes() -> int:
    """Resident set size of this process (``/proc/self/statm``, field 2).

    Kernels before 6.16 add per-CPU counters lazily: off by less than a MiB per CPU. The exact
    ``smaps_rollup`` walks the page tables and costs more than a whole sleep.
    """
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def available_bytes() -> int:
    """What this process could still allocate without swapping; page cache counts as available.

    The smaller of the machine's ``MemAvailable`` and what the limit of our control group (version 2) leaves.
    """
    machine = _field_bytes(Path("/proc/meminfo"), "MemAvailable:")
    ours = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
    group = Path("/sys/fs/cgroup", ours.lstrip("/"))
    try:
        limit = int((group / "memory.max").read_text())  # "max" means none
        used = int((group / "memory.current").read_text())
        cached = _field_bytes(group / "memory.stat", "inactive_file", unit=1)
    except (OSError, ValueError):
        return machine
    return min(machine, limit - used + cached)


def _field_bytes(path: Path, name: str, unit: int = 1024) -> int:
    for line in path.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value) * unit
    raise ValueError(f"{path} has no line {name}")
