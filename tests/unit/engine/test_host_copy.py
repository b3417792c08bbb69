"""A restarted engine finds its weights in shared memory; what must not be trusted is read again."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fakes.cuda_driver import FakeDriver
from fakes.cuda_memory import fake_machine
from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import write_tiny
from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ConfigError
from hotrack.core.host_copies import copy_name, copy_path
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine import build, host_copy
from hotrack.engine.host_copy import shared_copy
from hotrack.hub.resolve import resolve
from hotrack.memory import MemoryManager, SharedCopy

GPU = torch.device("cuda", 0)
REQUESTS = [request("a", range(3, 40), 12)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", "qwen3_moe")


@pytest.fixture(autouse=True)
def no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def find(path: Path, **options: object) -> SharedCopy:
    rank, size = options.pop("tp", (0, 1))
    dtype = options.pop("torch_dtype", torch.bfloat16)
    config = EngineConfig(model=str(path), **{"host_copy": "shared", **options})
    found = shared_copy(config, resolve(str(path)), dtype, GPU, TensorParallel(rank, size, None))
    assert found is not None
    return found


def test_private_is_the_default_and_removes_what_was_shared(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "copy_path", lambda name: copy_path(name, tmp_path))
    mine, other = copy_path(copy_name("model"), tmp_path), copy_path(copy_name("other"), tmp_path)
    for file in (mine, other):
        file.touch()
    config = EngineConfig(model=str(path))
    for device, stays in ((torch.device("cpu"), True), (GPU, False)):
        assert shared_copy(config, resolve(str(path)), torch.bfloat16, device, TensorParallel()) is None
        assert (mine.exists(), other.exists()) == (stays, True)


def test_refusals(path: Path) -> None:
    with pytest.raises(ConfigError, match="--host-copy must be one of private, shared"):
        EngineConfig(model="m", host_copy="public")
    with pytest.raises(ConfigError, match="leave out --no-enable-sleep-mode"):
        EngineConfig(model="m", host_copy="shared", enable_sleep_mode=False)
    with pytest.raises(ConfigError, match="use --host-copy private"):
        SteppedEngine(path, device="cpu", host_copy="shared")


def test_the_name_is_the_models(path: Path) -> None:
    assert find(path).name == copy_name("model")
    assert find(path, served_model_name="org/name").name == copy_name("org/name")
    assert find(path, tp=(1, 2)).name == copy_name("model", 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: {"torch_dtype": torch.float16},
        lambda path: {"tp": (1, 2)},
        lambda path: {"load_format": "dummy"},
        lambda path: {"load_format": "dummy", "seed": 3},
        lambda path: os.utime(path / "model.safetensors", ns=(1, 1)) or {},
        lambda path: (path / "config.json").write_text((path / "config.json").read_text() + " ") and {},
        lambda path: (path / "model-2.safetensors").touch() or {},
    ],
)
def test_the_key_is_all_that_decides_bytes(path: Path, change: Callable[[Path], dict[str, object]]) -> None:
    before = find(path)
    assert find(path).key == before.key
    (path / "README.md").touch()
    assert find(path, max_num_seqs=3).key == before.key
    options = change(path)
    changed = find(path, **options).key
    assert changed != before.key
    if options.get("seed"):
        assert changed != find(path, load_format="dummy").key


class Starts:
    """Engines on fake GPUs whose host copies are in ``directory``, and whether they read the model."""

    def __init__(self, path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.reads = path, 0

        def make(*_: object, **__: object) -> MemoryManager:
            machine = fake_machine(FakeDriver(), chunk_bytes=1 << 20, shared=find(path), directory=directory)
            return MemoryManager(machine=machine)

        def load(*args: object, **options: object) -> object:
            self.reads += 1
            return original(*args, **options)

        original = build.load_weights
        monkeypatch.setattr(build, "load_weights", load)
        monkeypatch.setattr(build, "MemoryManager", make)
        monkeypatch.setattr(MemoryManager, "drop_pages", lambda *_: 0)

    def __call__(self) -> tuple[dict[str, list[int]], int]:
        self.reads = 0
        engine = SteppedEngine(self.path, device="cpu", dtype="float32", num_threads=1)
        tokens = engine.run(REQUESTS)
        engine.do("sleep", level=1)
        engine.do("wake")
        assert engine.run(REQUESTS) == tokens
        engine.memory.close()
        engine.core.close()
        return tokens, self.reads


def test_a_restart_reads_no_weights(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Starts(path, tmp_path, monkeypatch)
    tokens, reads = start()
    assert reads == 1
    assert start() == (tokens, 0)
    os.utime(path / "model.safetensors")
    assert start() == (tokens, 1)
    assert start() == (tokens, 0)


def test_a_damaged_copy_is_replaced(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = Starts(path, tmp_path, monkeypatch)
    tokens, _ = start()
    with copy_path(copy_name("model"), tmp_path).open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-4096, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert start() == (tokens, 1)
    assert "reading the model files again" in caplog.text
    assert start() == (tokens, 0)
