"""Socket directories live exactly as long as their owner."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotrack.core import runtime_dir
from hotrack.core.runtime_dir import RuntimeDir, remove_leftovers

OWNER = "from hotrack.core.runtime_dir import RuntimeDir; print(RuntimeDir().path, flush=True); input()"


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's are too long for sockets
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_private_and_removed(scratch: Path) -> None:
    directory = RuntimeDir()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "http.sock").touch()
    assert remove_leftovers() == []
    directory.remove()
    assert list(scratch.iterdir()) == []


def test_only_what_a_killed_owner_left_is_removed(scratch: Path) -> None:
    mine = RuntimeDir()
    (scratch / "hotrack-demo-x").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert remove_leftovers() == []
        owner.kill()
        owner.wait()
        assert path.exists()
        assert remove_leftovers() == [path]
    assert not path.exists()
    assert {p.name for p in scratch.iterdir()} == {mine.path.name, "hotrack-demo-x"}
    mine.remove()


def test_a_long_temporary_path_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_dir, "_MAX_BASE_CHARS", 5)
    directory = RuntimeDir()
    assert directory.path.parent == Path("/tmp")
    directory.remove()
