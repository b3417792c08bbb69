"""The engine's device memory: allocation, and the door to sleep and wake."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hotrack.config import env
from hotrack.core.errors import (
    ChecksumError,
    ConfigError,
    RequestError,
    SleepError,
    TransitionError,
    WakeError,
)
from hotrack.core.lifecycle import EngineState, SleepLevel
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import process
from hotrack.memory.backend import BackendError, PhysicalBackend
from hotrack.memory.comm import CommRegion
from hotrack.memory.graph_pool import GraphPool
from hotrack.memory.kept import KeptRange
from hotrack.memory.machine import Machine, SharedCopy, cpu_machine, cuda_machine
from hotrack.memory.pinned_store import PinnedStore
from hotrack.memory.plan import plan_region
from hotrack.memory.region import Region
from hotrack.memory.reports import SleepReport, WakeReport
from hotrack.memory.sleeper import KV_CACHE, WEIGHTS, PackedCopies, Sleeper, Spent, WeightRegion
from hotrack.memory.store import ChunkStore, FileStore
from hotrack.memory.transfer import ChunkError

TAGS = (WEIGHTS, KV_CACHE)
BYTES_TAGS = {KV_CACHE: KV_CACHE, "workspace": KV_CACHE}  # a workspace wakes together with the KV cache


@dataclass(frozen=True, slots=True)
class _Woken:
    """What a wake is about, known before it starts."""

    tags: tuple[str, ...]
    restored_bytes: int
    mapped_bytes: int
    rss_before_bytes: int
    device_before_bytes: int | None


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
        make_store: Callable[[Path, int], ChunkStore] = FileStore,
        chunk_bytes: int | None = None,
        shared: SharedCopy | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.device = torch.device(device)
        if machine is None:
            if self.device.type == "cuda":
                machine = cuda_machine(self.device, num_threads, chunk_bytes, shared)
            elif self.device.type == "cpu":
                machine = cpu_machine(make_store, store_dir or env.store_dir(), num_threads, backend)
            else:
                raise ConfigError(f"--device {self.device.type}: memory regions exist for cpu and cuda")
        self.cycle = 0
        self._machine = machine
        self._backend = machine.backend
        self._sleeper = Sleeper(
            machine.backend,
            machine.mover,
            keeps_copies=enable_sleep_mode,
            fills_kv=machine.fills_kv,
            holders=machine.holders,
        )
        self._by_name: dict[str, WeightRegion] = {}
        self._waking: tuple[_Woken, Spent, float] | None = None
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

    @cached_property
    def graph_pool(self) -> GraphPool | None:
        """Memory for captured graphs; sleeps and wakes with the last region. None on a CPU, and where it
        cannot be had (a line in the log says why): graphs then stay on the device."""
        pool = self._sleeper.graphs = self._machine.graph_pool()
        return pool

    @property
    def comm(self) -> CommRegion:
        """What peers can see: exports of regions, which sleep closes, and memory that stays on the device."""
        return self._sleeper.comm

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
        return self._sleeper.regions

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if any(r.tag == tag and not r.mapped for r in self.regions))

    @property
    def is_landing(self) -> bool:
        """A streamed wake is under way."""
        return self._waking is not None

    @property
    def is_sleeping(self) -> bool:
        """Some region is asleep. Level 0 does not count: it touches no memory."""
        return bool(self.sleeping_tags)

    @property
    def missing_bytes(self) -> dict[str, int]:
        """By tag: what is asleep, and would be mapped by a wake."""
        return {tag: sum(r.asleep.nbytes for r in self.regions if r.tag == tag) for tag in TAGS}

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
            self._sleeper.add_weights(entry)
            self._by_name |= dict.fromkeys(entry.names, entry)
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
            self._sleeper.map_new(region)
        except (BackendError, ChunkError) as error:
            raise ConfigError(f"no room for {plan.nbytes} bytes of {name}: {error}") from error
        return region

    def loading(self, name: str) -> Tensor:
        """Where the loader is to write a weight: a CPU tensor inside its host copy on a GPU with sleep mode,
        so that its bytes move once; else the parameter itself. Valid until the next level 2 sleep.

        A weight that nobody asked for here may be written on the device; ``seal`` takes it from there.
        """
        entry = self._by_name[name]
        return self._sleeper.mover.loading(entry.region, entry.store, name)

    @property
    def attached(self) -> bool:
        """Every weight is in a host copy that an earlier process left in shared memory: load nothing;
        ``seal`` brings it to the device and compares it with its checksums. ``loading`` makes it False."""
        stores = [entry.store for entry in self._sleeper.weights]
        return bool(stores) and all(isinstance(store, PinnedStore) and store.attached for store in stores)

    def loaded(self, name: str) -> None:
        """All bytes of ``loading(name)`` are written and will not change: they may go to the device while the
        next weights are read. Optional; from one thread at a time.

        Raises:
            SleepError: the device refused.
        """
        entry = self._by_name[name]
        try:
            self._sleeper.mover.loaded(entry.region, entry.store, name)
        except ChunkError as error:
            raise SleepError(f"cannot bring weights to the device: {error}") from error

    def seal(self) -> None:
        """The weights are final: device and host store hold them, with a checksum per chunk. Nothing without
        sleep mode.

        Raises:
            SleepError: the store could not be written.
            ChecksumError: what an earlier process left is damaged; it is gone now, so load and seal again.
        """
        try:
            for entry in self._sleeper.weights:
                self._sleeper.seal(entry)
        except ChunkError as error:
            if error.corrupt:
                self._sleeper.discard_stores()
                raise ChecksumError(f"the shared host copy of the weights is damaged: {error}") from error
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

    def sleep(
        self,
        level: int = SleepLevel.KEEP_WEIGHTS,
        *,
        nbytes: int | None = None,
        keep: Sequence[KeptRange] = (),
    ) -> SleepReport:
        """Give device memory back. Level 0 touches no memory, 1 keeps weights in the host store, 2 drops
        them there, too.

        KV and workspace are lost at levels 1 and 2. ``nbytes`` (level 1): only about so much, by the chunk,
        KV first, then weights from the last layer backwards; a wake then moves no more than that. Asleep
        already: nothing happens, except that level 2 still drops the host store. Blocking; call it when
        nothing uses the regions any more. A wake under way is finished first.

        ``keep``: bytes of ``allocate_bytes`` tensors that outlive the sleep. What of them goes to sleep goes
        to the host and comes back, checked, with the wake of its region (which is then not streamed); a wake
        that fails leaves it there. ``kv_epoch`` grows all the same, for the rest. Name everything that is
        still wanted in every sleep, asleep or not: none means that what earlier ones kept is dropped.

        Raises:
            RequestError: no such level, or ``nbytes`` at another one than 1.
            SleepError: everything is as before, but see ``kv_epoch``.
        """
        if level not in tuple(SleepLevel):
            raise RequestError(f"sleep level must be 0, 1 or 2, got {level}", param="level")
        if nbytes is not None and level != SleepLevel.KEEP_WEIGHTS:
            raise RequestError(f"only a level 1 sleep can be partial, got level {level}", param="nbytes")
        if self._waking is not None:
            self.finish_wake()
        with self._transition() as started:
            before, device_before = process.rss_bytes(), self.device_bytes()
            if not keep and level != SleepLevel.PAUSE:
                self._sleeper.forget_kept(self.regions)
            parts = self._sleeper.choose(nbytes)
            drops_store = level == SleepLevel.DROP_WEIGHTS and self.store_bytes > 0
            if level == SleepLevel.PAUSE or not (parts or drops_store):
                parts, spent = [], Spent()
                changed = False
            else:
                spent = self._sleeper.fall_asleep(level, parts, keep)
                self.cycle += bool(parts)
                changed = True
            done = time.perf_counter()
            return SleepReport(
                level=level,
                changed=changed,
                tags=self.sleeping_tags,
                freed_bytes=sum(part.nbytes for part in parts) + spent.graph_bytes,
                bytes_copied=spent.copied_bytes + spent.kept_bytes,
                kept_bytes=spent.kept_bytes,
                store_bytes=self.store_bytes,
                rss_before_bytes=before,
                rss_after_bytes=process.rss_bytes(),
                device_before_bytes=device_before,
                device_after_bytes=self.device_bytes(),
                cycle=self.cycle,
                quiesce_ms=spent.quiesce_s * 1e3,
                copy_ms=spent.copy_s * 1e3,
                drop_ms=spent.drop_s * 1e3,
                unmap_ms=spent.unmap_s * 1e3,
                total_ms=(done - started) * 1e3,
            )

    def wake(self, tags: Collection[str] | None = None, *, streamed: bool = False) -> WakeReport:
        """Bring back the regions with one of ``tags`` ('weights', 'kv_cache'), or all. Awake already:
        nothing happens.

        Weights come back byte for byte, verified chunk by chunk, and are packed as they land; after level 2
        they are loaded again through ``reload`` and sealed. KV and workspace come back as zeros.

        ``streamed``: on a GPU, return once everything is mapped and on its way. ``wait_for`` must come before
        whatever reads a weight, and nothing computed may leave the process before ``finish_wake`` returned.

        Raises:
            RequestError: no such tag.
            WakeError: everything is asleep as before (ChecksumError: because the stored bytes are damaged).
        """
        for tag in tags or ():
            if tag not in TAGS:
                raise RequestError(f"unknown tag '{tag}'; tags are {', '.join(TAGS)}", param="tags")
        if self._waking is not None:
            self.finish_wake()
        with self._transition() as started:
            before = process.rss_bytes(), self.device_bytes()
            asleep = [r.asleep for r in self.regions if not r.mapped and (tags is None or r.tag in tags)]
            woken = _Woken(
                tuple(tag for tag in TAGS if any(part.region.tag == tag for part in asleep)),
                sum(part.nbytes for part in asleep if part.region.tag == WEIGHTS),
                sum(part.nbytes for part in asleep),
                *before,
            )
            spent = self._sleeper.wake_up(asleep, streamed=streamed)
            if self._sleeper.landing:
                self._waking = woken, spent, started
            return self._wake_report(woken, spent, started)

    def wait_for(self, names: Iterable[str]) -> None:
        """Make torch's current stream wait until these weights, and all KV memory, have arrived from a
        streamed wake. Does not block, and does nothing when none is under way.

        Raises:
            WakeError: the device refused; the wake is still to be finished.
        """
        if self._waking is not None:
            try:
                self._sleeper.mover.wait_for(list(names))
            except BackendError as error:
                raise WakeError(f"waiting for weights: {error}") from error

    def finish_wake(self) -> WakeReport:
        """Wait until a streamed wake has landed and is verified; the report is that of the whole wake.
        ``changed`` is False when none is under way.

        Raises:
            WakeError: everything that this wake brought back is asleep again (ChecksumError: because the
                stored bytes are damaged).
        """
        with self._transition() as started:
            if self._waking is None:
                return self._wake_report(
                    _Woken((), 0, 0, process.rss_bytes(), self.device_bytes()), Spent(), started
                )
            (woken, spent, began), self._waking = self._waking, None
            self._sleeper.finish_wake(spent)
            return self._wake_report(woken, spent, began)

    def _wake_report(self, woken: "_Woken", spent: Spent, started: float) -> WakeReport:
        done = time.perf_counter()
        return WakeReport(
            changed=bool(woken.tags),
            tags=woken.tags,
            restored_bytes=woken.restored_bytes,
            mapped_bytes=woken.mapped_bytes + spent.graph_bytes,
            bytes_copied=spent.copied_bytes,
            store_bytes=self.store_bytes,
            rss_before_bytes=woken.rss_before_bytes,
            rss_after_bytes=process.rss_bytes(),
            device_before_bytes=woken.device_before_bytes,
            device_after_bytes=self.device_bytes(),
            cycle=self.cycle,
            map_ms=spent.map_s * 1e3,
            copy_ms=spent.copy_s * 1e3,
            verify_ms=spent.verify_s * 1e3,
            prepack_ms=spent.pack_s * 1e3,
            reload_ms=spent.reload_s * 1e3,
            total_ms=(done - started) * 1e3,
        )

    def device_bytes(self) -> int | None:
        """What the driver says that this process holds on the device; None on a CPU."""
        return self._machine.device_bytes()

    def handles(self) -> dict[str, int]:
        """Live objects of the driver, none on a CPU: equal after every cycle, or something leaks."""
        stores = [entry.store for entry in self._sleeper.weights]
        pinned = [store for store in stores if isinstance(store, PinnedStore)]
        found = dict(self._machine.handles())
        if self._machine.mover.asynchronous:
            found["registrations"] = sum(store.registrations for store in pinned)
            found["registered_bytes"] = sum(store.nbytes for store in pinned)
        if (pool := self._sleeper.graphs) is not None:
            found |= {f"graph_{name}": count for name, count in pool.handles().items()}
        return found

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
        if (pool := vars(self).pop("graph_pool", None)) is not None:
            pool.close()
