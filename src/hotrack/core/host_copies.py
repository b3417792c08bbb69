"""Names of host copies of weights in shared memory, and the removal of those that nobody will come back for.

A copy stays when its engine ends, however that happens, because the next start is what it is for. So somebody
has to know which are still of use: a pool knows its members.
"""

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

DIRECTORY = Path("/dev/shm")
_ENDING = re.compile(r"-[0-9a-f]{8}-\d+of\d+")


def copy_name(served_name: str, rank: int = 0, size: int = 1) -> str:
    """Of the model that clients know by this name: the same at every start, whatever is in it."""
    return f"{_stem(served_name)}-{rank}of{size}"


def copy_path(name: str, directory: Path = DIRECTORY) -> Path:
    """Every user has files of their own."""
    return directory / f"hotrack-{os.geteuid()}-{name}"


def remove_stale(served_names: Collection[str], directory: Path = DIRECTORY) -> dict[Path, int]:
    """Remove this user's copies that no process uses and that are of none of these models; path -> bytes."""
    wanted = {_stem(name) for name in served_names}
    removed = {}
    for path in sorted(directory.glob(copy_path("*", Path()).name)):
        name = path.name.removeprefix(copy_path("", Path()).name)
        ending = _ENDING.search(name, max(0, len(name) - 40))
        if ending is None or ending.end() != len(name) or name.rpartition("-")[0] in wanted:
            continue
        if (nbytes := remove_unused(path)) is not None:
            removed[path] = nbytes
    return removed


def remove_unused(path: Path) -> int | None:
    """Bytes of a copy that was removed; None if a process holds it, it is not ours, or there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return None
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever opens it meanwhile notices that it is gone
        path.unlink()
        return found.st_size
    except OSError:
        return None
    finally:
        os.close(fd)


def _stem(served_name: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9._-]", "_", served_name).lstrip("._-")[:60] or "model"
    return f"{slug}-{hashlib.sha256(served_name.encode()).hexdigest()[:8]}"
