"""The engine's device memory: allocation, and the door to sleep and wake."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hotrack.config import env
from hotrack.core.errors import ConfigError, RequestError, SleepError, TransitionError
from hotrack.core.lifecycle import EngineState, SleepLevel
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import process
from hotrack.memory.backend import BackendError, MmapBackend, PhysicalBackend
from hotrack.memory.plan import plan_region
from hotrack.memory.region import Region
from hotrack.memory.reports import SleepReport, WakeReport
from hotrack.memory.sleeper import KV_CACHE, WEIGHTS, PackedCopies, Sleeper, WeightRegion
from hotrack.memory.store import FileStore, HostStore
from hotrack.memory.transfer import ChunkError, Timings, map_regions

TAGS = (WEIGHTS, KV_CACHE)
BYTES_TAGS = {KV_CACHE: KV_CACHE, "workspace": KV_CACHE}  # a workspace wakes together with the KV cache


class MemoryManager:
    """All regions of one rank on ``device``.

    Tensors handed out stay the same objects at the same address for ever; touching one whose region is
    asleep ends the process with SIGSEGV, by design. The engine drains before it calls ``sleep``.

    One transition at a time, never from inside another. After an error that could not be undone ``state``
    is FAILED and every further transition raises TransitionError.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        store_dir: Path | None = None,
        *,
        enable_sleep_mode: bool = True,
        num_threads: int = 2,
        backend: PhysicalBackend | None = None,
        make_store: Callable[[Path, int], HostStore] = FileStore,
    ) -> None:
        self.device = torch.device(device)
        if backend is None and self.device.type != "cpu":
            raise ConfigError(f"--device {self.device.type}: memory regions exist for cpu only")
        store = partial(make_store, store_dir or env.store_dir()) if enable_sleep_mode else None
        self.cycle = 0
        self._backend = backend or MmapBackend()
        self._sleeper = Sleeper(self._backend, store, num_threads)
        self._busy = threading.Lock()

    @property
    def packed(self) -> PackedCopies | None:
        """Copies that every sleep drops and every wake makes again; set by the engine."""
        return self._sleeper.packed

    @packed.setter
    def packed(self, packed: PackedCopies | None) -> None:
        self._sleeper.packed = packed

    @property
    def reload(self) -> Callable[[], None] | None:
        """Loads every weight into its tensor again; set by the engine. Without it level 2 is refused."""
        return self._sleeper.reload

    @reload.setter
    def reload(self, reload: Callable[[], None] | None) -> None:
        self._sleeper.reload = reload

    @property
    def state(self) -> EngineState:
        return self._sleeper.state

    @property
    def kv_epoch(self) -> int:
        """Grows whenever the contents of KV regions were lost. Whoever remembers what is in them (a prefix
        cache) compares it after every sleep, failed ones included."""
        return self._sleeper.kv_epoch

    @property
    def regions(self) -> list[Region]:
        return [entry.region for entry in self._sleeper.weights] + self._sleeper.others

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if any(r.tag == tag and not r.mapped for r in self.regions))

    @property
    def is_sleeping(self) -> bool:
        """Some region is asleep. Level 0 does not count: it touches no memory."""
        return bool(self.sleeping_tags)

    @property
    def weight_bytes(self) -> int:
        return sum(entry.region.nbytes for entry in self._sleeper.weights)

    @property
    def store_bytes(self) -> int:
        return sum(entry.store.nbytes for entry in self._sleeper.weights if entry.store)

    # -- allocation

    def allocate_weights(
        self, specs: Sequence[TensorSpec], *, mutable: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Zeroed tensors in one region in the given (execution) order; those named in ``mutable`` in a
        second one.

        Raises:
            ConfigError: the device has no room for them, or the store directory has none for their host copy.
        """
        fixed = [spec for spec in specs if spec.name not in mutable]
        changing = [spec for spec in specs if spec.name in mutable]
        tensors: dict[str, Tensor] = {}
        for name, part, is_mutable in ((WEIGHTS, fixed, False), ("mutable weights", changing, True)):
            if not part:
                continue
            entry = WeightRegion(self._new_region(name, WEIGHTS, part), is_mutable)
            if self._sleeper.make_store is not None:
                entry.store = self._sleeper.make_store(entry.region.nbytes)
            self._sleeper.weights.append(entry)
            tensors |= entry.region.tensors()
        return {spec.name: tensors[spec.name] for spec in specs}

    def allocate_bytes(self, tag: str, nbytes: int) -> Tensor:
        """Zeroed uint8 [nbytes], lost in every sleep and zeroed again by wake. ``tag``: 'kv_cache' or
        'workspace'.

        Raises:
            ConfigError: the device has no room.
        """
        assert tag in BYTES_TAGS, f"{tag=}"
        region = self._new_region(tag, BYTES_TAGS[tag], [TensorSpec(tag, (nbytes,), "uint8")])
        self._sleeper.others.append(region)
        return region.tensors()[tag]

    def _new_region(self, name: str, tag: str, specs: Sequence[TensorSpec]) -> Region:
        backend = self._backend
        plan = plan_region(specs, page_bytes=backend.page_bytes, chunk_bytes=backend.chunk_bytes)
        try:
            region = Region(name, tag, plan, backend)
            map_regions([region], Timings())
        except (BackendError, ChunkError) as error:
            raise ConfigError(f"no room for {plan.nbytes} bytes of {name}: {error}") from error
        return region

    def seal(self) -> None:
        """The weights are final: copy them to the host store with a checksum per chunk. Nothing without
        sleep mode.

        Raises:
            SleepError: the store could not be written.
        """
        try:
            for entry in self._sleeper.weights:
                self._sleeper.save(entry)
        except ChunkError as error:
            raise SleepError(f"cannot keep a host copy of the weights: {error}") from error

    def drop_pages(self, names: Sequence[str]) -> int:
        """Give back the pages of tensors whose packed copies are used instead; they become inaccessible
        until the next wake brings them back for ``PackedCopies.pack``. Returns bytes given back: none
        without a sealed store.

        Raises:
            SleepError: the device refused.
        """
        freed = 0
        for entry in self._sleeper.weights:
            if entry.sealed and not entry.mutable:
                try:
                    freed += entry.region.drop(set(names).intersection(entry.names))
                except BackendError as error:
                    raise SleepError(f"dropping pages of region '{entry.region.name}': {error}") from error
        return freed

    # -- transitions

    def sleep(self, level: int = SleepLevel.KEEP_WEIGHTS) -> SleepReport:
        """Give device memory back. Level 0 touches no memory, 1 keeps weights in the host store, 2 drops
        them there, too.

        KV and workspace are lost at levels 1 and 2. Asleep already: nothing happens, except that level 2
        still drops the host store. Blocking; call it when nothing uses the regions any more.

        Raises:
            RequestError: no such level.
            SleepError: everything is as before, but see ``kv_epoch``.
        """
        if level not in tuple(SleepLevel):
            raise RequestError(f"sleep level must be 0, 1 or 2, got {level}", param="level")
        with self._transition() as started:
            before = process.rss_bytes()
            awake = [region for region in self.regions if region.nbytes and region.mapped]
            drops_store = level == SleepLevel.DROP_WEIGHTS and self.store_bytes > 0
            if level == SleepLevel.PAUSE or not (awake or drops_store):
                return self._sleep_report(started, before, level=level, changed=False)
            spent = self._sleeper.fall_asleep(level, awake)
            self.cycle += bool(awake)
            return self._sleep_report(
                started,
                before,
                level=level,
                changed=True,
                freed_bytes=sum(region.nbytes for region in awake),
                copy_ms=spent.copy_s * 1e3,
                drop_ms=spent.drop_s * 1e3,
                unmap_ms=spent.unmap_s * 1e3,
            )

    def _sleep_report(
        self,
        started: float,
        rss_before_bytes: int,
        *,
        level: int,
        changed: bool,
        freed_bytes: int = 0,
        copy_ms: float = 0.0,
        drop_ms: float = 0.0,
        unmap_ms: float = 0.0,
    ) -> SleepReport:
        return SleepReport(
            level=level,
            changed=changed,
            tags=self.sleeping_tags,
            freed_bytes=freed_bytes,
            store_bytes=self.store_bytes,
            rss_before_bytes=rss_before_bytes,
            rss_after_bytes=process.rss_bytes(),
            cycle=self.cycle,
            copy_ms=copy_ms,
            drop_ms=drop_ms,
            unmap_ms=unmap_ms,
            total_ms=(time.perf_counter() - started) * 1e3,
        )

    def wake(self, tags: Collection[str] | None = None) -> WakeReport:
        """Bring back the regions with one of ``tags`` ('weights', 'kv_cache'), or all. Awake already:
        nothing happens.

        Weights come back byte for byte, verified chunk by chunk, and are packed as they land; after level 2
        they are loaded again through ``reload`` and sealed. KV and workspace come back as zeros.

        Raises:
            RequestError: no such tag.
            WakeError: everything is asleep as before (ChecksumError: because the stored bytes are damaged).
        """
        for tag in tags or ():
            if tag not in TAGS:
                raise RequestError(f"unknown tag '{tag}'; tags are {', '.join(TAGS)}", param="tags")
        with self._transition() as started:
            before = process.rss_bytes()
            asleep = [r for r in self.regions if not r.mapped and (tags is None or r.tag in tags)]
            spent = self._sleeper.wake_up(asleep)
            return WakeReport(
                changed=bool(asleep),
                tags=tuple(tag for tag in TAGS if any(region.tag == tag for region in asleep)),
                restored_bytes=sum(region.nbytes for region in asleep if region.tag == WEIGHTS),
                mapped_bytes=sum(region.nbytes for region in asleep),
                store_bytes=self.store_bytes,
                rss_before_bytes=before,
                rss_after_bytes=process.rss_bytes(),
                cycle=self.cycle,
                map_ms=spent.map_s * 1e3,
                copy_ms=spent.copy_s * 1e3,
                verify_ms=spent.verify_s * 1e3,
                prepack_ms=spent.pack_s * 1e3,
                reload_ms=spent.reload_s * 1e3,
                total_ms=(time.perf_counter() - started) * 1e3,
            )

    @contextmanager
    def _transition(self) -> Iterator[float]:
        """Yields the time it began."""
        assert self._busy.acquire(blocking=False), "sleep and wake have one owner and do not nest"
        try:
            if self.state is EngineState.FAILED:
                raise TransitionError(
                    "an earlier sleep or wake could not be undone; the engine must be restarted",
                    code="memory_failed",
                )
            yield time.perf_counter()
        finally:
            self._busy.release()

    def close(self) -> None:
        """Give everything back; tensors become inaccessible. For tests and orderly shutdown."""
        self._sleeper.close()
