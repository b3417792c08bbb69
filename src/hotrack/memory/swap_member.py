"""A member of the swap benchmark: weights, KV cache and graphs of a ``MemoryManager``, without a model."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrack.core.errors import ConfigError
from hotrack.core.progress import Progress
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory.graph_pool import GraphPool
from hotrack.memory.manager import MemoryManager
from hotrack.memory.store import FileStore
from hotrack.memory.swap_contents import (
    RandomBytes,
    exact_rss_bytes,
    fingerprint,
    mismatches,
    synthetic_specs,
)
from hotrack.memory.swap_graphs import SwapGraphs

Landing = Callable[[str], Tensor]
Load = Callable[[Landing, Progress], None]
"""Writes every weight into the tensor that ``landing(name)`` gives."""

_THREADS = {"cpu": 2, "cuda": 8}
"""For host copies: on a CPU they move the bytes; on a GPU they only touch and pin, which is slow with few."""


class SwapMember:
    """The methods without underscore are the worker's operations; their results are plain data."""

    device: torch.device
    tensors: list[Tensor]

    def __init__(self) -> None:
        self.wanted: list[int] = []
        self.graphs: SwapGraphs | None = None
        self._pool: GraphPool | None = None

    def init(
        self,
        device: str,
        nbytes: int,
        tensor_bytes: int,
        seed: int,
        kv_bytes: int = 0,
        graphs: int = 0,
        model: str | None = None,
        options: dict[str, Any] | None = None,
        progress: Progress = lambda _done, _total: None,
    ) -> dict[str, Any]:
        """Allocate and fill; afterwards the member is awake and may sleep."""
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        specs, load = (
            (synthetic_specs(nbytes, tensor_bytes), None) if model is None else self.open_model(model)
        )
        self.allocate(specs, kv_bytes, options or {})
        if load is None:
            self.fill(specs, seed, progress)
        else:
            load(self.landing, progress)
        self.ready()
        if load is not None:
            self.wanted = [fingerprint(tensor) for tensor in self.tensors]
        if graphs:
            self.graphs = SwapGraphs(self.tensors, self.graph_pool(), graphs)
        self._drop_cache()
        return {"weight_bytes": sum(spec.nbytes for spec in specs), "tensors": len(specs), **self.stats()}

    def fill(self, specs: Sequence[TensorSpec], seed: int, progress: Progress) -> None:
        contents = RandomBytes(seed, self.device)
        total = sum(spec.nbytes for spec in specs)
        for index, spec in enumerate(specs):
            data = contents.next(spec.nbytes)
            self.landing(spec.name).copy_(data)
            self.landed(spec.name)
            self.wanted.append(fingerprint(data))
            progress(min(total, (index + 1) * specs[0].nbytes), total)

    def check(self) -> dict[str, Any]:
        """Compare every byte, through fingerprints, and replay the graphs."""
        wrong = mismatches(self.tensors, self.wanted)
        replayed = self.graphs.replay_is_identical() if self.graphs is not None else None
        self._drop_cache()
        return {"wrong": len(wrong), "graphs_identical": replayed}

    def use(self) -> dict[str, Any]:
        """Read the last tensor, as the first token would; the result is on the host when this returns."""
        return {"value": int(self.tensors[-1].view(-1).view(torch.uint8)[-4096:].sum().item())}

    def _drop_cache(self) -> None:
        """What a check needed is not the member's; it would count as left behind while asleep."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- what a peer does differently

    def open_model(self, model: str) -> tuple[list[TensorSpec], Load]:
        raise ConfigError(f"--model {model}: this worker holds synthetic bytes only")

    def allocate(self, specs: Sequence[TensorSpec], kv_bytes: int, options: dict[str, Any]) -> None:
        """``options``: store_dir, chunk_bytes. Sets ``tensors``."""
        directory = options.get("store_dir")
        self.manager = MemoryManager(
            self.device,
            Path(directory) if directory else None,
            num_threads=_THREADS[self.device.type],
            make_store=self._make_store,
            chunk_bytes=options.get("chunk_bytes"),
        )
        self.specs = specs
        named = self.manager.allocate_weights(specs)
        self.tensors = [named[spec.name] for spec in specs]
        if kv_bytes:
            self.manager.allocate_bytes("kv_cache", kv_bytes)

    def _make_store(self, directory: Path, nbytes: int) -> "DamageableStore":
        self._store = DamageableStore(directory, nbytes)
        return self._store

    def landing(self, name: str) -> Tensor:
        """Where the bytes of a weight are to be written before ``ready``."""
        return self.manager.loading(name)

    def landed(self, name: str) -> None:
        """All bytes of one weight are written."""
        self.manager.loaded(name)

    def ready(self) -> None:
        """All weights are written."""
        self.manager.seal()

    def graph_pool(self) -> Any:
        """The ``pool`` argument of torch.cuda.graph.

        Raises:
            ConfigError: graphs cannot sleep here.
        """
        if self.device.type != "cuda":
            raise ConfigError(f"--graphs: there are no graphs on {self.device}; leave the option out")
        self._pool = GraphPool(self.device)
        return self._pool.mempool.id

    def sleep(self, nbytes: int | None = None) -> dict[str, Any]:
        """Level 1; ``nbytes``: only as much as that."""
        report = self.manager.sleep(1, nbytes=nbytes)
        if self._pool is not None and nbytes is None:
            self._pool.sleep()
        return {"report": asdict(report), "missing_bytes": report.freed_bytes}

    def wake(self) -> dict[str, Any]:
        """Everything, verified."""
        report = self.manager.wake()
        if self._pool is not None:
            self._pool.wake()
        return {"report": asdict(report)}

    def corrupt(self) -> dict[str, Any]:
        """Change one bit in the middle of the host copy; the second call changes it back."""
        if self.device.type == "cpu":
            self._store.flip_bit()
        else:
            name = self.specs[len(self.specs) // 2].name
            data = self.manager.loading(name).view(-1).view(torch.uint8)
            data[data.numel() // 2] ^= 16
        return {}

    def stats(self, *, resident: bool = True) -> dict[str, Any]:
        """Everything that a cycle could leak, as the kernel and the driver tell it; the resident set, which
        takes longest, on demand."""
        cuda = self.device.type == "cuda"
        pool = self._pool.handles() if self._pool is not None else {}
        graphs = {f"graph {name}": count for name, count in pool.items()}
        return {
            "rss_bytes": exact_rss_bytes() if resident else None,
            "device_bytes": self.manager.device_bytes(),
            "host_bytes": self.manager.store_bytes,
            "handles": self.manager.handles() | graphs,
            "free_bytes": torch.cuda.mem_get_info(self.device)[0] if cuda else None,
        }


class DamageableStore(FileStore):
    """A host store that the benchmark can damage."""

    def flip_bit(self) -> None:
        """Call it twice and nothing has happened."""
        offset = self.nbytes // 2
        value = os.pread(self._fd, 1, offset)[0]
        os.pwrite(self._fd, bytes([value ^ 16]), offset)
