import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hotrack.memory import device_process
from hotrack.memory.device_process import describe_holders, device_bytes, holders

GIB = 2**30
UUID = "GPU-0a1b"
OTHER = 2**22 + 1  # larger than any pid on Linux


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, processes: dict[str, list[tuple[int, int | None]]]) -> None:
        self.processes = processes
        self.inits = self.lookups = 0

    def nvmlInit(self) -> None:
        self.inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.lookups += 1
        if uuid not in self.processes:
            raise self.NVMLError(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes[handle]]


@pytest.fixture(autouse=True)
def fresh_handles() -> Iterator[None]:
    device_process._handle.cache_clear()
    yield
    device_process._handle.cache_clear()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml({UUID: [(OTHER, 12 * GIB), (os.getpid(), 3 * GIB)], "MIG-7": [(os.getpid(), None)]})
    monkeypatch.setattr(device_process, "pynvml", fake)
    return fake


def test_bytes_of_this_and_of_another_process(nvml: FakeNvml) -> None:
    assert device_bytes(device=UUID) == 3 * GIB
    assert device_bytes(OTHER, UUID) == 12 * GIB
    assert nvml.inits == nvml.lookups == 1  # the handle is kept


def test_nobody_knows(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_bytes(OTHER + 1, UUID) is None  # not listed
    assert device_bytes(device="MIG-7") is None  # no bytes per process there
    assert device_bytes(device="GPU-none") is None
    assert device_bytes(device="cpu") is None
    assert holders("MIG-7")[0].nbytes is None
    monkeypatch.setattr(device_process, "pynvml", None)
    assert device_bytes(device=UUID) is None
    assert holders(UUID) == []
    assert describe_holders(UUID) == ""


def test_an_error_of_the_driver_is_not_an_error_here(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_handle: str) -> list[SimpleNamespace]:
        raise nvml.NVMLError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lost)
    assert device_bytes(device=UUID) is None
    assert holders(UUID) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_ordinal_without_cuda_is_unknown(nvml: FakeNvml) -> None:
    assert device_bytes(device=0) is None


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda:1"), torch.device("cuda")])
def test_ordinals_are_matched_by_uuid(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, device: torch.device | str | int
) -> None:
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(uuid="0a1b")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_bytes(OTHER, device) == 12 * GIB
    assert asked == [1]


def test_holders_are_named_most_first(nvml: FakeNvml) -> None:
    with open("/proc/self/comm") as file:
        mine = file.read().strip()
    assert holders(UUID) == [(OTHER, "?", 12 * GIB), (os.getpid(), mine, 3 * GIB)]
    assert describe_holders(UUID) == f"held by ? (pid {OTHER}) 12.0 GiB, {mine} (pid {os.getpid()}) 3.0 GiB"
    assert describe_holders(UUID, limit=1).endswith("12.0 GiB, 1 more")
