"""A host copy in shared memory: left behind, found again, and never trusted without reason."""

import os
import threading
from pathlib import Path

import pytest

from fakes.cuda_driver import FakeDriver
from fakes.cuda_memory import CHUNK, fake_machine
from hotrack.core.errors import ChecksumError, ConfigError
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import MemoryManager, SharedCopy, shared_segment
from hotrack.memory.shared_segment import SegmentSpec, SharedSegment

SPECS = [TensorSpec(f"t{i}", (CHUNK // 2 + i,), "uint8") for i in range(7)]


class Member:
    def __init__(self, directory: Path, key: str = "v1", name: str = "m") -> None:
        self.driver = FakeDriver()
        machine = fake_machine(self.driver, shared=SharedCopy(name, key), directory=directory)
        self.memory = MemoryManager(machine=machine)
        self.weights = self.memory.allocate_weights(SPECS)

    def load(self, first: int = 1) -> None:
        for index, spec in enumerate(SPECS):
            self.memory.loading(spec.name).fill_(first + index)
            self.memory.loaded(spec.name)
        self.memory.seal()

    def check(self, first: int = 1) -> None:
        assert all(bool((self.weights[s.name] == first + i).all()) for i, s in enumerate(SPECS))


def path(directory: Path) -> Path:
    return directory / f"hotrack-{os.geteuid()}-m"


def test_a_restarted_member_loads_nothing(tmp_path: Path) -> None:
    first = Member(tmp_path)
    assert not first.memory.attached
    first.load()
    first.memory.sleep()
    first.memory.close()
    assert path(tmp_path).stat().st_mode & 0o777 == 0o600
    second = Member(tmp_path)
    assert second.memory.attached
    second.memory.seal()
    second.check()
    second.memory.sleep()
    second.memory.wake()
    second.check()
    second.memory.close()


@pytest.mark.parametrize("why", ["key", "cut", "header", "loads again"])
def test_what_does_not_fit_is_replaced(tmp_path: Path, why: str) -> None:
    first = Member(tmp_path)
    first.load()
    first.memory.close()
    if why == "cut":
        os.truncate(path(tmp_path), path(tmp_path).stat().st_size - 1)
    if why == "header":
        with path(tmp_path).open("r+b") as file:
            file.seek(20)
            file.write(b"\xff")
    second = Member(tmp_path, key="v2" if why == "key" else "v1")
    assert second.memory.attached is (why == "loads again")
    second.load(first=50)
    assert not second.memory.attached
    second.check(first=50)
    second.memory.close()


def test_unsealed_contents_are_not_used(tmp_path: Path) -> None:
    first = Member(tmp_path)
    first.memory.loading("t0").fill_(1)
    first.memory.close()
    assert not Member(tmp_path).memory.attached


def test_damaged_bytes_are_found_by_the_first_upload(tmp_path: Path) -> None:
    first = Member(tmp_path)
    first.load()
    first.memory.close()
    with path(tmp_path).open("r+b") as file:
        file.seek(-CHUNK, os.SEEK_END)
        file.write(b"\x99")
    second = Member(tmp_path)
    with pytest.raises(ChecksumError, match="shared host copy of the weights is damaged"):
        second.memory.seal()
    assert not second.memory.attached
    second.load()
    second.check()
    second.memory.sleep()
    second.memory.wake()
    second.check()
    second.memory.close()


def test_one_live_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_segment, "LOCK_WAIT_S", 0.0)
    first = Member(tmp_path)
    with pytest.raises(ConfigError, match="in use by a live process"):
        Member(tmp_path)
    first.memory.close()
    Member(tmp_path).memory.close()


def test_a_process_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    first = Member(tmp_path)
    first.load()
    threading.Timer(0.3, first.memory.close).start()
    second = Member(tmp_path)
    assert second.memory.attached
    second.memory.close()


def test_level_2_removes_the_segment(tmp_path: Path) -> None:
    member = Member(tmp_path)
    member.load()
    member.memory.reload = member.load
    member.memory.sleep(2)
    assert not path(tmp_path).exists()
    member.memory.close()


def test_links_foreign_modes_and_names_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("x")
    path(tmp_path).symlink_to(target)
    with pytest.raises(ConfigError, match="remove it, or choose another name"):
        Member(tmp_path)
    assert target.read_text() == "x"
    path(tmp_path).unlink()
    path(tmp_path).touch(mode=0o644)
    path(tmp_path).chmod(0o644)
    with pytest.raises(ConfigError, match="only this user may read and write"):
        Member(tmp_path)
    for name in ("../x", "", "a/b", "x" * 200):
        with pytest.raises(ConfigError, match="shared memory name"):
            Member(tmp_path, name=name)


def test_no_room_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"full\. Remove stale .* --shm-size"):
        SharedSegment(SegmentSpec("m", 1 << 20, 1, bytes(32)), tmp_path)
    assert not path(tmp_path).exists()
