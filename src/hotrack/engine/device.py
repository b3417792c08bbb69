"""Which device an engine computes on, in which dtype, and the thread that does it."""

from concurrent.futures import ThreadPoolExecutor

import torch

from hotrack.core.errors import ConfigError
from hotrack.modelspec.spec import ModelSpec


def resolve_device(name: str) -> torch.device:
    """The device for ``--device``, with its index if it is a GPU.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.device("cuda" if name == "auto" else name).index
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} sees {count} CUDA devices; use --device cpu, or "
            "check the driver, CUDA_VISIBLE_DEVICES and that torch was built for CUDA"
        )
    return torch.device("cuda", index)


def resolve_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype for ``--dtype``. 'auto' is the checkpoint's; on a GPU float32 becomes bfloat16."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and spec.dtype == "float32" else spec.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def device_worker(num_threads: int | None = None, device: torch.device | None = None) -> ThreadPoolExecutor:
    """The thread for all that computes, loading and packing included; ``num_threads`` intra-op threads.

    Only one: OpenMP keeps a team per calling thread, and once the teams together have more threads than
    there are cores it stops spinning at barriers, which doubles the time of a decode step. A GPU is this
    thread's current device.
    """
    return ThreadPoolExecutor(1, "hotrack-device", initializer=_set_up, initargs=(num_threads, device))


def _set_up(num_threads: int | None, device: torch.device | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
