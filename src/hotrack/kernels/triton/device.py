"""What a launch must know of a device."""

import functools
from dataclasses import dataclass

from torch import Tensor
from triton.runtime import driver


@dataclass(frozen=True, slots=True)
class Device:
    """``shared_bytes``: shared memory one program may have."""

    shared_bytes: int
    multiprocessors: int


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
