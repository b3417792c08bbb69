"""What members hold on GPUs, by a driver that a test makes up."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fakes.nvml import GIB, FakeGpu, FakeNvml
from hotrack.core.errors import ConfigError
from hotrack.members.gpu import Gpus, is_below
from hotrack.members.probe import GpuProbe, descendants, tree_bytes

TREE = """
import subprocess, sys, time
child = "import os, time; os.setsid(); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", child])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree() -> Iterator[tuple[int, int]]:
    """Pids of a process that leads a session, and of its child, which leads another."""
    parent = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        yield parent.pid, child
    finally:
        os.kill(child, 9)
        parent.kill()
        parent.wait()
        parent.stdout.close()


def one_gpu() -> tuple[FakeGpu, Gpus]:
    gpu = FakeGpu("GPU-0")
    return gpu, Gpus(lambda: FakeNvml(gpu))


def probe(gpus: Gpus, name: str = "a") -> GpuProbe:
    gpu = gpus.find("cuda:0", {})
    assert gpu is not None
    return GpuProbe(name, gpu)


def test_a_member_is_its_process_and_all_below_it(tree: tuple[int, int]) -> None:
    parent, child = tree
    gpu, gpus = one_gpu()
    gpu.held = {parent: 1 * GIB, child: 2 * GIB, os.getpid(): 4 * GIB, 999_999_999: 8 * GIB}
    assert asyncio.run(probe(gpus).memory_bytes(parent)) == 3 * GIB
    assert is_below(child, parent)
    assert not is_below(os.getpid(), parent)
    assert not is_below(parent, child)


def test_descendants_are_found_with_and_without_the_kernels_lists(
    tree: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child = tree
    assert descendants(parent) == [child]
    assert descendants(999_999_999) == []
    alone, whole = tree_bytes(child), tree_bytes(parent)
    assert alone is not None
    assert whole is not None
    assert whole > alone > 0
    from hotrack.members import probe as module

    class OldKernel(type(module.Path())):  # type: ignore[misc]
        def read_text(self, *args: object, **kwargs: object) -> str:
            if self.name == "children":
                raise FileNotFoundError(self)
            return str(super().read_text())

    monkeypatch.setattr(module, "Path", OldKernel)
    assert descendants(parent) == [child]


def test_a_driver_that_tells_no_bytes_per_process_is_read_by_its_total(
    caplog: pytest.LogCaptureFixture, tree: tuple[int, int]
) -> None:
    gpu, gpus = one_gpu()
    gpu.hidden = 3 * GIB  # somebody else's
    a, b = probe(gpus, "a"), probe(gpus, "b")

    def read(one: GpuProbe) -> int | None:
        return asyncio.run(one.memory_bytes(tree[0]))

    with caplog.at_level(logging.WARNING):
        a.moving()
        gpu.hidden += 20 * GIB
        assert read(a) == 20 * GIB
        a.moving()
        gpu.hidden -= 19 * GIB
        assert read(a) == 1 * GIB
        b.moving()
        gpu.hidden += 30 * GIB
        assert (read(a), read(b)) == (1 * GIB, 30 * GIB)
        a.moving()
        gpu.hidden += 19 * GIB
        assert (read(a), read(b)) == (20 * GIB, 30 * GIB)
        b.moving()
        gpu.hidden -= 30 * GIB
        b.gone()
        assert (read(a), read(b)) == (20 * GIB, 0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "a: the driver does not tell what its processes hold on cuda:0 (NVIDIA H200)" in said[0]
    gpu.held = {tree[0]: None}
    assert read(a) == 20 * GIB  # listed without bytes


@pytest.mark.parametrize(
    ("visible", "device", "uuid"),
    [
        (None, "cuda", "GPU-a"),
        (None, "cuda:2", "GPU-c"),
        ("2,0", "cuda:0", "GPU-c"),
        ("2,0", "cuda:1", "GPU-a"),
        ("GPU-b", "cuda:0", "GPU-b"),
        (" 1 , -1, 2", "cuda:0", "GPU-b"),
    ],
)
def test_ordinals_follow_what_the_process_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, uuid: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus(lambda: FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c")))
    own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = gpus.find(device, own)
    assert found is not None
    assert found.uuid == uuid
    assert found is gpus.find(device, own)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus.find(device, {}) is found


@pytest.mark.parametrize(
    ("visible", "device"),
    [(None, "cuda:7"), ("0", "cuda:1"), ("", "cuda"), ("-1", "cuda"), ("GPU-x", "cuda")],
)
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus(lambda: FakeNvml(FakeGpu("GPU-a")))
    with pytest.raises(ConfigError, match=r"no such GPU .*nvidia-smi -L"):
        gpus.find(device, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def test_without_nvml_nobody_is_found_and_it_is_loaded_once() -> None:
    loads: list[int] = []

    def load() -> None:
        loads.append(1)

    gpus = Gpus(load)
    assert gpus.find("cuda", {}) is None
    assert not gpus.available({})
    assert loads == [1]


def test_a_lost_gpu_is_a_typed_error_for_its_total_and_unknown_per_process() -> None:
    gpu = FakeGpu("GPU-a", held={os.getpid(): GIB})
    nvml = FakeNvml(gpu)
    found = Gpus(lambda: nvml).find("cuda", {})
    assert found is not None
    assert found.memory() == (80 * GIB, 1.5 * GIB, 78.5 * GIB)
    nvml.failing = True
    assert found.tree_bytes(os.getpid()) is None
    with pytest.raises(ConfigError, match="GPU is lost"):
        found.memory()
