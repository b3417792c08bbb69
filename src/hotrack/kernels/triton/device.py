"""What a launch must know of a device."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver


@dataclass(frozen=True, slots=True)
class Device:
    """``shared_bytes``: shared memory one program may have."""

    shared_bytes: int
    multiprocessors: int


@triton.jit
def enter(PDL: tl.constexpr):
    """What comes before this in a kernel may run while the kernel before it still does (programmatic
    dependent launch), so it may read only what that one did not write. The next kernel may be launched from
    here on: as each waits before it lets the next one come, all but the last one are known to be over."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def dependent(tensor: Tensor) -> dict[str, Any]:
    """Options of a launch on the tensor's device whose kernel calls :func:`enter`."""
    if tensor.is_cuda and _overlaps(tensor.device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


INTERPRETER = Device(96 << 10, 4)


@functools.cache
def _cuda_device(index: int) -> Device:
    found = driver.active.utils.get_device_properties(index)
    return Device(found["max_shared_mem"], found["multiprocessor_count"])


def device_of(tensor: Tensor) -> Device:
    """The device that holds ``tensor``; for one in host memory, what the interpreter is told."""
    if not tensor.is_cuda:
        return INTERPRETER
    return _cuda_device(tensor.device.index)
