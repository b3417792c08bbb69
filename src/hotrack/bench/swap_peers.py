"""Other ways to put a process's device memory to sleep, measured with the same workers, sizes and clock.

A peer runs in the worker ``tools/peers/swap_peers.py`` of a checkout; its files come from a folder that
``tools/peers/fetch_swap_peers.py`` fills, or are installed.
"""

import importlib.util
import os
import sys
from pathlib import Path

from hotrack.bench.swap_options import Subject
from hotrack.config import env
from hotrack.core.errors import ConfigError

CHECKOUT = Path(__file__).parents[3]
WORKER = CHECKOUT / "tools" / "peers" / "swap_peers.py"
FOLDER = CHECKOUT / ".peers"

# Name in the table: package it needs, file of that package that shows it is complete.
PEERS = {
    "torch_memory_saver": ("torch_memory_saver", "entrypoint.py"),
    "torch_memory_saver, retained": ("torch_memory_saver", "entrypoint.py"),
    "vLLM allocator": ("vllm", "cumem_allocator.abi3.so"),
}


def find_peers(where: str) -> list[Subject]:
    """``where``: 'auto' (those found in ``.peers`` of the checkout or installed), 'none', or a folder.

    Raises:
        ConfigError: a folder was named and holds no peer, or there is no checkout to run them from.
    """
    if where == "none":
        return []
    folder = FOLDER if where == "auto" else Path(where)
    found = [name for name, (package, file) in PEERS.items() if _has(folder, package, file)]
    if where != "auto":
        _demand(folder, found)
    if not WORKER.exists():
        return []
    paths = [str(CHECKOUT / "src"), str(folder.resolve()), env.expand("PYTHONPATH") or ""]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return [Subject(name, (sys.executable, str(WORKER), name), environment, is_peer=True) for name in found]


def _demand(folder: Path, found: list[str]) -> None:
    if not WORKER.exists():
        raise ConfigError(f"--peers {folder}: peers run from a checkout of hotrack; {WORKER} does not exist")
    if not found:
        raise ConfigError(
            f"--peers {folder}: neither torch_memory_saver nor vllm is in there. Fill it with "
            f"'python tools/peers/fetch_swap_peers.py {folder}'"
        )


def _has(folder: Path, package: str, file: str) -> bool:
    if (folder / package / file).exists():
        return True
    spec = importlib.util.find_spec(package)  # looks, but does not import
    places = (spec.submodule_search_locations or []) if spec else []
    return any((Path(place) / file).exists() for place in places)
