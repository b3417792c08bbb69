"""The only place that reads the environment."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where models and sleeping members' host copies live: HOTRACK_CACHE, else $XDG_CACHE_HOME/hotrack, else
    ~/.cache/hotrack."""
    if value := os.environ.get("HOTRACK_CACHE"):
        return Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hotrack"


def store_dir() -> Path:
    """Directory for unlinked host-store files on CPU (HOTRACK_STORE_DIR, default ``cache_dir()/store``)."""
    value = os.environ.get("HOTRACK_STORE_DIR")
    return Path(value).expanduser() if value else cache_dir() / "store"


def offline() -> bool:
    """True when HF_HUB_OFFLINE asks for no network."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def api_key() -> str | None:
    """HOTRACK_API_KEY: the default of every ``--api-key``."""
    return os.environ.get("HOTRACK_API_KEY") or None


def log_level() -> str:
    return os.environ.get("HOTRACK_LOG_LEVEL", "info")


def c_compiler() -> str | None:
    """CC: the C compiler for kernels that are built on this machine."""
    return os.environ.get("CC") or None


def native_kernels() -> bool:
    """HOTRACK_NATIVE=0 turns compiled CPU kernels off; their torch twins are used."""
    return os.environ.get("HOTRACK_NATIVE", "1").lower() not in ("0", "false", "no", "off")


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES: which GPUs processes that we start may use, and in which order."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def expand(name: str) -> str | None:
    """Value for ``${env.NAME}`` in a pool file; None when unset."""
    return os.environ.get(name)


def rank_environment() -> dict[str, str]:
    """What a rank process must find in its environment before its first allocation or parallel loop.

    GLIBC_TUNABLES: packed weights come from the heap; with transparent huge pages behind it, streaming them
    once per token is a fifth faster. One arena, so that all of it can be trimmed.

    GOMP_SPINCOUNT: OpenMP's default is to spin for milliseconds at every barrier. That is harmless on an idle
    machine; when another process wants one of the cores, a decode step takes 70 times as long. A few
    microseconds bridge the gap between two kernels just as well.

    A user's own setting of either wins.

    NCCL_GRAPH_REGISTER, NCCL_LOCAL_REGISTER: NCCL would show peers the buffers of captured graphs and those
    a user registers, both of which sleep unmaps. Off whatever the user says: a peer would go on writing to
    memory that is no longer ours. NVLink multicast is left as it is.
    """
    tunables = {
        "hugetlb": "1",
        "mmap_threshold": str(1 << 30),
        "top_pad": str(1 << 26),
        "trim_threshold": str(1 << 28),
        "arena_max": "1",
    }
    ours = ":".join(f"glibc.malloc.{name}={value}" for name, value in tunables.items())
    return {
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", ours),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "5000"),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_GRAPH_REGISTER": "0",
        "NCCL_LOCAL_REGISTER": "0",
    }


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment for a process we start: ours plus ``extra``."""
    return {**os.environ, **extra}
