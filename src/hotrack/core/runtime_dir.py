"""Directories for sockets: private, short enough for a socket's address, and gone when their owner is."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "hotrack-run-"
_MAX_BASE_CHARS = 70  # sockaddr_un holds 108 bytes


class RuntimeDir:
    """A new directory (mode 0700) under the temporary directory. Its owner holds a lock on it, which the
    kernel releases however the owner ends: an unlocked one is a leftover.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
            with suppress(FileNotFoundError):  # taken for a leftover before it was locked
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Once. Errors are ignored: a leftover is removed later."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_leftovers() -> list[Path]:
    """Remove this user's runtime directories whose owners were killed; the removed ones."""
    removed = []
    for path in _base().glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody removes it at the same time; another user's cannot even be opened
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(lock)
    return removed


def _base() -> Path:
    base = tempfile.gettempdir()
    return Path(base if len(base) <= _MAX_BASE_CHARS else "/tmp")
