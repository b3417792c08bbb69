"""How a step's numbers reach the device, and its results the host, without anyone waiting in between."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrack.memory.cuda_backend import device_view

Numbers = NDArray[np.int32] | NDArray[np.int64]
STAGES = 3  # steps whose upload may not have run yet


class Uploader(Protocol):
    """``upload``: tensors of the arrays' shapes and dtypes on the device. All values fit in 32 bits."""

    def upload(self, arrays: Sequence[Numbers]) -> list[Tensor]: ...


class SharedUpload:
    """On a CPU: the arrays' own memory."""

    def upload(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class _Stage:
    """Pinned memory and ``seen``, the same memory as a tensor on the device."""

    def __init__(self, total: int, device: torch.device) -> None:
        self.pinned = torch.empty(max(4096, 2 * total), dtype=torch.int32, pin_memory=True)
        nbytes = self.pinned.nbytes
        self.seen = device_view(self.pinned.data_ptr(), nbytes, device).view(torch.int32)
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]


class PinnedUpload:
    """To a GPU: everything in one pinned int32 buffer that a kernel reads and widens. A copy would stand in
    the copy engine's queue behind whatever is there, and a wake puts gigabytes there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stages: list[_Stage] = []
        self._turn = 0

    def upload(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        total = sum(array.size for array in arrays)
        stage = self._stage(total)
        staged, start = stage.pinned.numpy(), 0
        for array in arrays:
            staged[start : start + array.size] = array.reshape(-1)
            start += array.size
        wide = stage.seen[:total].long()
        stage.read.record(torch.cuda.current_stream(self.device))
        return _cut(arrays, wide.int(), wide)

    def _stage(self, total: int) -> _Stage:
        """A buffer for ``total`` numbers that nobody reads any more."""
        if len(self._stages) < STAGES:
            self._stages.append(_Stage(total, self.device))
            return self._stages[-1]
        self._turn = (self._turn + 1) % STAGES
        stage = self._stages[self._turn]
        stage.read.synchronize()  # by the step of STAGES steps ago: long done
        if stage.pinned.numel() < total:
            stage = self._stages[self._turn] = _Stage(total, self.device)
        return stage


def _cut(arrays: Sequence[Numbers], narrow: Tensor, wide: Tensor) -> list[Tensor]:
    tensors, start = [], 0
    for array in arrays:
        source = wide if array.dtype == np.int64 else narrow
        tensors.append(source[start : start + array.size].view(array.shape))
        start += array.size
    return tensors


def make_uploader(device: torch.device) -> Uploader:
    return PinnedUpload(device) if device.type == "cuda" else SharedUpload()


class Landed:
    """Results on their way to the host; ``wait`` returns once they are there. On a CPU they already are."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def to_host(tensor: Tensor) -> Tensor:
    """The tensor, or a pinned copy of a GPU's that is there once a later :class:`Landed` has been waited
    for."""
    return tensor.to("cpu", non_blocking=True)
