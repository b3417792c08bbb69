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


def expand(name: str) -> str | None:
    """Value for ``${env.NAME}`` in a pool file; None when unset."""
    return os.environ.get(name)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment for a process we start: ours plus ``extra``."""
    return {**os.environ, **extra}
