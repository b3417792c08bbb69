"""A host copy that outlives its process: a file in shared memory, so that a restart need not read the model.

    header   magic, version, sealed, bytes of data, number of chunks, layout, checksum of all this and of
    digests  8 bytes per chunk
    data     page-aligned

Held with ``flock`` by the process that uses it; the kernel lets go of that however the process ends.
"""

import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hotrack.core.errors import ConfigError
from hotrack.core.host_copies import DIRECTORY, copy_path
from hotrack.memory.host_memory import HostMemory
from hotrack.memory.plan import round_up

LOCK_WAIT_S = 15.0  # a process that was killed takes seconds to let go of so much memory
_MAGIC, _VERSION = b"HOTRACK\0", 1
_HEADER = struct.Struct("<8sIIQQ32s")
_ALIGN = 2 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """``layout``: 32 bytes that are equal only if the same data would be written."""

    name: str
    nbytes: int
    num_chunks: int
    layout: bytes


class SharedSegment:
    """``digests`` are those of a sealed segment that was found, else None; then it is empty and unsealed.

    Raises:
        ConfigError: the name is malformed, somebody else's or in use, or there is no room.
    """

    def __init__(self, spec: SegmentSpec, directory: Path = DIRECTORY) -> None:
        if not _NAME.fullmatch(spec.name):
            raise ConfigError(
                f"shared memory name '{spec.name}': use letters, digits, '.', '_' and '-', at most 100"
            )
        self.spec = spec
        self.path = copy_path(spec.name, directory)
        self._data_offset = round_up(_HEADER.size + 8 + 8 * spec.num_chunks, _ALIGN)
        self._size = self._data_offset + spec.nbytes
        self._fd = self._open()
        try:
            self.digests = self._read()
            if self.digests is None:
                self._make_room()
            self.memory = HostMemory(spec.nbytes, self._fd, self._data_offset)
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        while True:
            try:
                fd = os.open(self.path, flags, 0o600)
            except OSError as error:
                raise ConfigError(
                    f"shared memory {self.path}: {error.strerror}; remove it, or choose another name "
                    "(--served-model-name)"
                ) from error
            try:
                self._lock(fd)
                if _is_at(fd, self.path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its last owner has just removed it

    def _lock(self, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"shared memory {self.path} is not a file that only this user may read and write: remove it, "
                "or choose another name (--served-model-name)"
            )
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"shared memory {self.path} is in use by a live process: stop it, or choose another "
                        "name (--served-model-name), or use --host-copy private"
                    ) from error
                time.sleep(0.1)

    def _read(self) -> list[int] | None:
        raw = os.pread(self._fd, _HEADER.size + 8 + 8 * self.spec.num_chunks, 0)
        if raw != self._header(_digests_in(raw, self.spec.num_chunks)):
            return None
        return _digests_in(raw, self.spec.num_chunks) if os.fstat(self._fd).st_size == self._size else None

    def _header(self, digests: Sequence[int]) -> bytes:
        spec = self.spec
        fields = _HEADER.pack(_MAGIC, _VERSION, 1, spec.nbytes, spec.num_chunks, spec.layout)
        packed = struct.pack(f"<{len(digests)}Q", *digests)
        return fields + xxhash.xxh3_64(fields + packed).digest() + packed

    def _make_room(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.posix_fallocate(self._fd, 0, self._size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            free = os.statvfs(self.path.parent)
            reason = "full" if error.errno == errno.ENOSPC else error.strerror
            raise ConfigError(
                f"shared memory {self.path} needs {self._size} bytes and {self.path.parent} has "
                f"{free.f_bavail * free.f_frsize}: {reason}. Remove stale hotrack-* files there, enlarge it "
                f"(mount -o remount,size=...; containers: --shm-size), or use --host-copy private"
            ) from error

    def seal(self, digests: Sequence[int]) -> None:
        """The data are final."""
        os.pwrite(self._fd, self._header(digests), 0)

    def unseal(self) -> None:
        """The data are about to change."""
        os.pwrite(self._fd, bytes(_HEADER.size), 0)
        self.digests = None

    def close(self, *, remove: bool) -> None:
        """``memory`` must be closed before or stay unused."""
        if self._fd < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _digests_in(raw: bytes, count: int) -> list[int]:
    packed = raw[_HEADER.size + 8 :].ljust(8 * count, b"\0")
    return list(struct.unpack(f"<{count}Q", packed))


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
