"""Where the host copy of an engine's weights lives, what it must be equal to, and how it is filled."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hotrack._version import __version__
from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ChecksumError, ConfigError
from hotrack.core.host_copies import copy_name, copy_path, remove_unused
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.hub.model import ResolvedModel
from hotrack.memory.machine import SharedCopy
from hotrack.memory.manager import MemoryManager
from hotrack.obs.log import get_logger

_READ_BY_LOADERS = (".safetensors", ".gguf", ".json")

log = get_logger("hotrack.engine")


def shared_copy(
    config: EngineConfig,
    resolved: ResolvedModel,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
) -> SharedCopy | None:
    """The name of this rank's copy in shared memory, or None for a private one: then an earlier start's copy
    is of no use any more, and goes.

    Raises:
        ConfigError: there is none to be had on this device.
    """
    name = copy_name(config.served_model_name or resolved.name, tp.rank, tp.size)
    if config.host_copy == "private":
        if device.type == "cuda" and (nbytes := remove_unused(copy_path(name))) is not None:
            log.info("removed %s (%d bytes), left by --host-copy shared", copy_path(name), nbytes)
        return None
    if device.type != "cuda":
        raise ConfigError(
            f"--host-copy shared is for GPUs; on {device} the host copy is an unnamed file in "
            "HOTRACK_STORE_DIR: use --host-copy private"
        )
    source = (
        ("dummy", config.seed, _contents(resolved.path / "config.json"))
        if config.load_format == "dummy"
        else tuple(_files(resolved.path))
    )
    made = (__version__, torch.__version__, str(dtype), torch.cuda.get_device_capability(device))
    return SharedCopy(name, repr((source, made, tp.rank, tp.size)))


def fill(memory: MemoryManager, load: Callable[[], None]) -> bool:
    """Bring every weight to the device and into its host copy. Returns whether ``load`` was needed.

    Raises:
        SleepError: the device or the host store failed.
    """
    if memory.attached:
        try:
            memory.seal()
        except ChecksumError as error:
            log.warning("%s; reading the model files again", error.message)
        else:
            return False
    load()
    memory.seal()
    return True


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    """What decides which bytes a loader finds: name, size and time of every file that it may read."""
    names = [path] if path.is_file() else sorted(path.iterdir())
    for name in names:
        if name.suffix in _READ_BY_LOADERS:
            found = os.stat(name)  # of a link's target
            yield name.name, found.st_size, found.st_mtime_ns


def _contents(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
