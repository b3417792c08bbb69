"""pynvml as far as the control plane uses it, over processes and bytes that a test makes up."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class FakeNvmlError(Exception):
    pass


@dataclass
class FakeGpu:
    uuid: str
    total: int = 80 * GIB
    name: str = "NVIDIA H200"
    driver_bytes: int = GIB // 2
    held: dict[int, int | None] = field(default_factory=dict)  # by pid; None: the driver does not tell
    hidden: int = 0  # by processes of another PID namespace


class FakeNvml:
    """``num_calls`` counts requests for processes; ``failing`` makes every request fail."""

    NVMLError = FakeNvmlError

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus
        self.num_calls = 0
        self.failing = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise FakeNvmlError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid.startswith(uuid):
                return gpu
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:  # older bindings return bytes
        return gpu.name.encode()

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        self._check()
        used = gpu.driver_bytes + gpu.hidden + sum(num_bytes or 0 for num_bytes in gpu.held.values())
        return SimpleNamespace(total=gpu.total, used=used, free=gpu.total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self.num_calls += 1
        self._check()
        return [SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in gpu.held.items()]

    def _check(self) -> None:
        if self.failing:
            raise FakeNvmlError("GPU is lost")
