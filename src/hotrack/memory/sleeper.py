"""Sleep and wake of a set of regions, all or nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from hotrack.core.errors import ChecksumError, SleepError, TransitionError, WakeError
from hotrack.core.heap import trim_heap
from hotrack.core.lifecycle import EngineState, SleepLevel
from hotrack.memory.backend import PhysicalBackend
from hotrack.memory.region import ChunkState, Region
from hotrack.memory.store import HostStore
from hotrack.memory.transfer import (
    ChunkError,
    Timings,
    map_regions,
    release_regions,
    restore_region,
    save_region,
    unmap_regions,
)

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class PackedCopies(Protocol):
    """Copies of weights in another layout (oneDNN's, say) that live beside the regions."""

    def drop(self) -> None:
        """Free every copy. Must not fail; called when there is nothing left to drop, too."""

    def pack(self, names: Sequence[str]) -> None:
        """The raw bytes of ``names`` are valid: copy them. May call ``MemoryManager.drop_pages`` on them."""


@dataclass(slots=True, eq=False)
class WeightRegion:
    """``store`` is None after level 2 and without sleep mode; ``sealed``: it holds the region's bytes.

    ``mutable``: the tensors may change, so the region is saved again by every sleep.
    """

    region: Region
    mutable: bool = False
    store: HostStore | None = None
    sealed: bool = False

    @property
    def names(self) -> list[str]:
        return [placement.spec.name for placement in self.region.plan.placements]


@dataclass(slots=True)
class Spent(Timings):
    """Seconds a transition spent by phase; the inherited ones are summed over threads."""

    drop_s: float = 0.0
    unmap_s: float = 0.0
    pack_s: float = 0.0
    reload_s: float = 0.0


@dataclass(slots=True, eq=False)
class Sleeper:
    """Moves regions between awake and asleep. On any failure everything is moved back and a typed error
    says which region and chunk it was; if moving back fails as well, ``state`` is FAILED for good.

    ``make_store``: a store for so many bytes, or None without sleep mode. ``kv_epoch``: see
    ``MemoryManager``.
    """

    backend: PhysicalBackend
    make_store: Callable[[int], HostStore] | None
    num_threads: int
    weights: list[WeightRegion] = field(default_factory=list)
    others: list[Region] = field(default_factory=list)
    packed: PackedCopies | None = None
    reload: Callable[[], None] | None = None
    state: EngineState = EngineState.AWAKE
    kv_epoch: int = 0

    def save(self, entry: WeightRegion) -> None:
        """Fill the host store of one region. Raises ChunkError, or ConfigError when there is no room for a
        store."""
        if self.make_store is None:
            return
        assert entry.region.mapped, f"{entry.region.name} is asleep"
        assert not entry.region.has_drops, "the bytes of dropped tensors are not there to be saved"
        self._make_store(entry)
        assert entry.store is not None, f"{entry.region.name=}"
        entry.sealed = False
        save_region(entry.region, entry.store, self.num_threads)
        entry.sealed = True

    def _make_store(self, entry: WeightRegion) -> None:
        if entry.store is None and self.make_store is not None:
            entry.store = self.make_store(entry.region.nbytes)

    def close(self) -> None:
        """Give back every region and store; nothing works afterwards."""
        self.state = EngineState.FAILED
        self._put_back([entry.region for entry in self.weights] + self.others)
        _close_stores(self.weights)

    # -- sleep

    def fall_asleep(self, level: int, awake: Sequence[Region]) -> Spent:
        """Level 1 or 2. Raises SleepError; then ``awake`` is awake, and KV was lost only if ``kv_epoch``
        has changed."""
        spent = Spent()
        self._check_can_sleep(level, awake)
        self.state = EngineState.FALLING_ASLEEP
        start = time.perf_counter()
        # Until something is released, making it accessible again restores every byte.
        with self._or_undo(lambda: map_regions(awake, Timings()), EngineState.AWAKE, SleepError):
            for entry in self.weights:
                if entry.mutable and entry.region in awake:
                    self.save(entry)
            saved = time.perf_counter()
            unmap_regions(awake)
        unmapped = time.perf_counter()
        with self._or_undo(lambda: self._bring_back(awake, Spent()), EngineState.AWAKE, SleepError):
            if self.packed is not None:
                self.packed.drop()
            trim_heap()
            dropped = time.perf_counter()
            self._release(awake)
        if level == SleepLevel.DROP_WEIGHTS:
            _close_stores(self.weights)
        self.state = EngineState.ASLEEP
        spent.copy_s, spent.drop_s = saved - start, dropped - unmapped
        spent.unmap_s = unmapped - saved + time.perf_counter() - dropped
        return spent

    def _check_can_sleep(self, level: int, awake: Sequence[Region]) -> None:
        if level == SleepLevel.DROP_WEIGHTS:
            if self.reload is None:
                raise SleepError(
                    "sleep level 2 drops the weights, and this engine has no way to load them again"
                )
            return
        if self.make_store is None:
            raise SleepError(
                "sleep level 1 keeps a host copy of the weights; start the engine with --enable-sleep-mode"
            )
        if any(entry.region in awake and not entry.sealed and not entry.mutable for entry in self.weights):
            raise SleepError("sleep level 1 needs the host copy of the weights, which was never sealed")

    def _release(self, regions: Sequence[Region]) -> None:
        # Weights first: if the device refuses midway they can be restored, and the KV cache is still whole.
        release_regions([region for region in regions if region.tag == WEIGHTS])
        others = [region for region in regions if region.tag != WEIGHTS]
        if others:
            self.kv_epoch += 1
            release_regions(others)

    # -- wake

    def wake_up(self, asleep: Sequence[Region]) -> Spent:
        """Raises WakeError or ChecksumError; then ``asleep`` is asleep."""
        spent = Spent()
        self.state = EngineState.WAKING
        lost = [entry for entry in self.weights if entry.region in asleep and not entry.sealed]
        with self._or_undo(lambda: self._put_back(asleep, lost), EngineState.ASLEEP, WakeError):
            self._check_room(asleep)
            if lost:
                self._load_again(lost, spent)
            self._bring_back([region for region in asleep if not region.mapped], spent)
        everything = [entry.region for entry in self.weights] + self.others
        self.state = EngineState.AWAKE if all(r.mapped for r in everything) else EngineState.ASLEEP
        return spent

    def _check_room(self, asleep: Sequence[Region]) -> None:
        # Only weights: they are filled at once, while the KV cache of a CPU fills as it is used.
        needed = sum(region.nbytes for region in asleep if region.tag == WEIGHTS)
        available = self.backend.available_bytes()
        if needed > available:
            raise WakeError(f"the weights need {needed} bytes and the device has {available} left")

    def _load_again(self, lost: Sequence[WeightRegion], spent: Spent) -> None:
        """After level 2. The regions do not count as awake before the loader has returned and the copy is
        sealed."""
        if self.reload is None:
            raise WakeError(
                "the weights were dropped by sleep level 2, and there is no way to load them again"
            )
        for entry in lost:  # a full disk should show before minutes of loading
            self._make_store(entry)
        map_regions([entry.region for entry in lost], spent)
        start = time.perf_counter()
        self.reload()
        spent.reload_s += time.perf_counter() - start
        for entry in lost:
            self.save(entry)
            self._pack(entry.names, spent)

    def _bring_back(self, regions: Sequence[Region], spent: Spent) -> None:
        """Map ``regions``, weights with their bytes from the store, packing them as they land."""
        for entry in self.weights:
            if entry.region not in regions:
                continue
            if entry.sealed and entry.store is not None:
                entry.region.forget_drops()
                with closing(restore_region(entry.region, entry.store, self.num_threads, spent)) as landed:
                    for names in landed:
                        self._pack(names, spent)
            elif ChunkState.RELEASED in entry.region.state:
                raise TransitionError(f"region '{entry.region.name}' was given back and has no host copy")
            else:
                map_regions([entry.region], spent)
                self._pack(entry.names, spent)
        map_regions([region for region in regions if region.tag != WEIGHTS], spent)

    def _pack(self, names: Sequence[str], spent: Spent) -> None:
        if self.packed is not None:
            start = time.perf_counter()
            self.packed.pack(names)
            spent.pack_s += time.perf_counter() - start

    def _put_back(self, regions: Sequence[Region], lost: Sequence[WeightRegion] = ()) -> None:
        _close_stores(lost)  # the loader fills all of them or none, so they stay lost together
        if self.packed is not None and any(region.tag == WEIGHTS for region in regions):
            self.packed.drop()
        unmap_regions(regions)
        release_regions(regions)

    @contextmanager
    def _or_undo(
        self, undo: Callable[[], None], state: EngineState, kind: type[SleepError | WakeError]
    ) -> Iterator[None]:
        """Whatever goes wrong inside: ``undo``, set ``state``, and raise ``kind`` (an interrupt stays an
        interrupt)."""
        try:
            yield
        except BaseException as error:
            self._undo(undo, state, error)
            if not isinstance(error, Exception):
                raise
            corrupt = isinstance(error, ChunkError) and error.corrupt
            raise (ChecksumError if corrupt else kind)(str(error)) from error

    def _undo(self, undo: Callable[[], None], state: EngineState, cause: BaseException) -> None:
        self.state = EngineState.FAILED
        try:
            undo()
        except Exception as error:
            raise TransitionError(
                f"{cause}; moving everything back failed as well: {error}. The engine must be restarted",
                code="memory_failed",
            ) from error
        self.state = state


def _close_stores(entries: Sequence[WeightRegion]) -> None:
    for entry in entries:
        if entry.store is not None:
            entry.store.close()
        entry.store = None
        entry.sealed = False
