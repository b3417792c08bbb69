"""The host's copy of a region, with a checksum per chunk."""

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path
from typing import Protocol, runtime_checkable

import xxhash

from hotrack.core.errors import ConfigError


class StoreError(Exception):
    """Saving or restoring a chunk failed. Never leaves the package."""


class StoreCorruptError(StoreError):
    """The bytes that came back do not have the checksum of the bytes that were saved."""


class HostStore(Protocol):
    """``nbytes``: what it holds; 0 once closed."""

    nbytes: int

    def close(self) -> None:
        """Give the space back."""

    def leave(self) -> None:
        """Like ``close``, at the end of the process: what the next one could use may stay."""


@runtime_checkable
class ChunkStore(HostStore, Protocol):
    """A store that copies by itself. Chunks are addressed by their byte offset in the region. Methods may run
    on several threads, one per chunk."""

    def save(self, offset: int, address: int, nbytes: int) -> None:
        """Copy device memory into the store and remember its checksum. Raises StoreError."""

    def restore(self, offset: int, address: int, nbytes: int) -> None:
        """Copy a saved chunk back to device memory. Raises StoreError."""

    def verify(self, offset: int, address: int, nbytes: int) -> None:
        """Compare device memory with the checksum of the chunk. Raises StoreCorruptError."""


class FileStore:
    """A file without a name, so nothing is left behind however the process ends.

    Exactly ``nbytes``, allocated at once: a full disk shows here and not in the middle of the first sleep.
    Its pages are page cache, which the system may write out and reclaim: the memory of a sleeper is free to
    others.

    Raises:
        ConfigError: the directory cannot hold the file.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._checksums: dict[int, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = _open_unnamed(directory)
        except OSError as error:
            raise _cannot_hold(directory, nbytes, error) from error
        try:
            if nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            os.close(self._fd)
            raise _cannot_hold(directory, nbytes, error) from error

    def save(self, offset: int, address: int, nbytes: int) -> None:
        memory = _memory(address, nbytes)
        checksum = xxhash.xxh3_64_intdigest(memory)
        try:
            done = 0
            while done < nbytes:
                done += os.pwrite(self._fd, memory[done:], offset + done)
        except OSError as error:
            raise StoreError(f"writing the host store: {error.strerror}") from error
        self._checksums[offset] = checksum

    def restore(self, offset: int, address: int, nbytes: int) -> None:
        memory = _memory(address, nbytes)
        try:
            done = 0
            while done < nbytes:
                count = os.preadv(self._fd, [memory[done:]], offset + done)
                if count == 0:
                    raise StoreError(
                        f"the host store ends at byte {offset + done}, {nbytes - done} too early"
                    )
                done += count
        except OSError as error:
            raise StoreError(f"reading the host store: {error.strerror}") from error

    def verify(self, offset: int, address: int, nbytes: int) -> None:
        found, saved = xxhash.xxh3_64_intdigest(_memory(address, nbytes)), self._checksums.get(offset)
        if found != saved:
            wanted = "none, it was never saved" if saved is None else f"{saved:016x}"
            raise StoreCorruptError(f"checksum is {found:016x}, saved was {wanted}")

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.nbytes = 0


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _open_unnamed(directory: Path) -> int:
    with contextlib.suppress(OSError):  # some file systems (NFS, older overlayfs) have no unnamed files
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(prefix="hotrack-store-", dir=directory)
    os.unlink(name)
    return fd


def _cannot_hold(directory: Path, nbytes: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"the host store needs {nbytes} bytes in {directory}: {error.strerror}. Free some space there, point "
        "HOTRACK_STORE_DIR at another directory, or start without --enable-sleep-mode"
    )
