"""The host store: exact, unnamed, allocated before anything depends on it."""

import ctypes
import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from hotrack.core.errors import ConfigError, WakeError
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import FileStore, MemoryManager
from hotrack.memory.store import StoreCorruptError, StoreError

Buffer = ctypes.Array[ctypes.c_ubyte]


def buffer(content: bytes) -> Buffer:
    return (ctypes.c_ubyte * len(content)).from_buffer_copy(content)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path / "made" / "here", 5000)
    yield store
    store.close()


def test_round_trip_of_odd_sizes(store: FileStore) -> None:
    first, second = buffer(os.urandom(4096)), buffer(os.urandom(904))
    store.save(0, ctypes.addressof(first), 4096)
    store.save(4096, ctypes.addressof(second), 904)
    got = buffer(bytes(4096))
    store.restore(0, ctypes.addressof(got), 4096)
    store.verify(0, ctypes.addressof(got), 4096)
    assert bytes(got) == bytes(first)
    store.restore(4096, ctypes.addressof(got), 904)
    store.verify(4096, ctypes.addressof(got), 904)
    assert bytes(got)[:904] == bytes(second)


def test_verify_tells_damage_from_never_saved(store: FileStore) -> None:
    data = buffer(bytes(100))
    with pytest.raises(StoreCorruptError, match="never saved"):
        store.verify(0, ctypes.addressof(data), 100)
    store.save(0, ctypes.addressof(data), 100)
    data[50] = 1
    with pytest.raises(StoreCorruptError, match=r"checksum is [0-9a-f]{16}, saved was [0-9a-f]{16}"):
        store.verify(0, ctypes.addressof(data), 100)


def test_size_is_exact_and_allocated_at_once(store: FileStore) -> None:
    status = os.fstat(store._fd)
    assert status.st_size == 5000
    assert status.st_blocks * 512 >= 5000
    assert status.st_nlink == 0


def test_nothing_is_ever_visible_in_the_directory(store: FileStore, tmp_path: Path) -> None:
    assert list((tmp_path / "made" / "here").iterdir()) == []


def test_file_systems_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def no_tmpfile(path: object, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_tmpfile)
    store = FileStore(tmp_path, 10)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(store._fd).st_nlink == 0
    store.close()


def test_closing_twice_closes_one_descriptor(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10)
    store.close()
    with tempfile.TemporaryFile(dir=tmp_path) as other:  # takes the descriptor that was closed
        store.close()
        os.fstat(other.fileno())
    assert store.nbytes == 0


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_room_is_an_error_at_start(tmp_path: Path, small_files: None) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"needs 2097152 bytes in .*File too large.*HOTRACK_STORE_DIR"):
        MemoryManager(store_dir=tmp_path).allocate_weights([TensorSpec("w", (2 << 20,), "uint8")])
    assert open_descriptors() == before


def test_full_disk_is_an_error_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        FileStore(tmp_path, 10)


def test_unusable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        FileStore(tmp_path / "file", 10)


def test_no_room_for_a_new_store_after_level_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryManager(store_dir=tmp_path)
    tensor = memory.allocate_weights([TensorSpec("w", (100,), "uint8")])["w"]

    def reload() -> None:
        loads.append(tensor.fill_(5))

    loads: list[Tensor] = []
    memory.reload = reload
    memory.seal()
    memory.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(WakeError, match="the host store needs 4096 bytes"):
            memory.wake()
    assert loads == [], "found out before loading"
    assert memory.sleeping_tags == ("weights",)
    memory.wake()
    assert tensor.tolist() == [5] * 100
    memory.close()


def test_write_error_is_a_store_error(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    data = buffer(bytes(10))
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        store.save(0, ctypes.addressof(data), 10)


def test_short_reads_and_writes_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_write(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real_read(fd, [views[0][:11]], offset))
    data, got = buffer(os.urandom(100)), buffer(bytes(100))
    store.save(0, ctypes.addressof(data), 100)
    store.restore(0, ctypes.addressof(got), 100)
    assert bytes(got) == bytes(data)
