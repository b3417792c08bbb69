"""Which host copies in shared memory are stale, and that only those go."""

import fcntl
import os
from pathlib import Path

import pytest

from hotrack.core.host_copies import copy_name, copy_path, remove_stale


def make(directory: Path, name: str, nbytes: int = 10) -> Path:
    path = copy_path(name, directory)
    path.write_bytes(bytes(nbytes))
    return path


def test_names_are_safe_and_differ() -> None:
    names = [copy_name(n) for n in ("a/b", "a_b", "A_b", "../x", "", "x" * 500, "ü", "a b")]
    assert len(set(names)) == len(names)
    assert all(name[0].isalnum() and "/" not in name and len(name) <= 100 for name in names)
    assert copy_name("m", 1, 2) != copy_name("m", 0, 2) != copy_name("m", 0, 1)
    assert copy_name("m") == copy_name("m")


def test_only_copies_that_nobody_uses_or_wants_go(tmp_path: Path) -> None:
    wanted = [make(tmp_path, copy_name("qwen/a", rank, 2)) for rank in (0, 1)]
    stale = make(tmp_path, copy_name("old"), 77), make(tmp_path, copy_name("qwen/a-1"), 5)
    used = make(tmp_path, copy_name("running"))
    others = [tmp_path / f"hotrack-{os.geteuid() + 1}-{copy_name('old')}", make(tmp_path, "by-hand")]
    others[0].touch()
    (tmp_path / copy_path(copy_name("link"), tmp_path).name).symlink_to(others[0])
    with used.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_stale(["qwen/a"], tmp_path) == {stale[0]: 77, stale[1]: 5}
        assert all(path.exists() for path in (*wanted, used, *others))
    assert list(remove_stale(["qwen/a"], tmp_path)) == [used]


def test_nothing_there(tmp_path: Path) -> None:
    assert remove_stale([], tmp_path) == {}
    assert remove_stale([], tmp_path / "missing") == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_files_that_cannot_be_opened_stay(tmp_path: Path) -> None:
    path = make(tmp_path, copy_name("m"))
    path.chmod(0)
    assert remove_stale([], tmp_path) == {}
