"""Sleep and wake of a set of regions, all or nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from hotrack.core.errors import ChecksumError, ConfigError, SleepError, TransitionError, WakeError
from hotrack.core.heap import trim_heap
from hotrack.core.lifecycle import EngineState, SleepLevel
from hotrack.memory.backend import BackendError, PhysicalBackend
from hotrack.memory.comm import CommRegion
from hotrack.memory.kept import Kept, KeptRange, keep
from hotrack.memory.region import ChunkState, Part, Region
from hotrack.memory.store import HostStore, StoreCorruptError
from hotrack.memory.transfer import (
    ChunkError,
    Mover,
    Timings,
    map_parts,
    release_parts,
    unmap_parts,
)

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class PackedCopies(Protocol):
    """Copies of weights in another layout (oneDNN's, say) that live beside the regions."""

    def drop(self) -> None:
        """Free every copy. Must not fail; called when there is nothing left to drop, too."""

    def pack(self, names: Sequence[str]) -> None:
        """The raw bytes of ``names`` are valid: copy them. May call ``MemoryManager.drop_pages`` on them, on
        a CPU. There it is called for tensors as they land, on a GPU for all of them in the end."""


class GraphMemory(Protocol):
    """What captured graphs use beside the regions. All or nothing, typed errors, twice is once."""

    @property
    def nbytes(self) -> int:
        """Bytes it occupies awake."""

    @property
    def mapped(self) -> bool:
        """It is awake."""

    def sleep(self) -> int:
        """Unmap; returns bytes given back."""

    def wake(self) -> int:
        """Map at the old addresses with undefined contents; returns bytes mapped."""

    def handles(self) -> dict[str, int]:
        """Live driver objects."""


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

    quiesce_s: float = 0.0
    drop_s: float = 0.0
    unmap_s: float = 0.0
    pack_s: float = 0.0
    reload_s: float = 0.0
    graph_bytes: int = 0
    kept_bytes: int = 0


@dataclass(slots=True, eq=False)
class Sleeper:
    """Moves parts of regions between awake and asleep. On any failure everything is moved back and a typed
    error says which region and chunk it was; if moving back fails as well, ``state`` is FAILED for good.

    ``keeps_copies``: whether there are host stores (sleep mode). ``fills_kv``: KV regions take their memory
    at once when they wake, not as they are used. ``holders``: who holds the device's memory, for messages.
    ``kv_epoch``: see ``MemoryManager``. ``graphs`` sleep and wake with the last region: a graph needs all of
    them. ``comm``: what peers see of the regions is closed before any of them is unmapped, and opened again
    when all are awake.
    """

    backend: PhysicalBackend
    mover: Mover
    keeps_copies: bool
    fills_kv: bool = False
    holders: Callable[[], str] = lambda: ""
    weights: list[WeightRegion] = field(default_factory=list)
    others: list[Region] = field(default_factory=list)
    packed: PackedCopies | None = None
    reload: Callable[[], None] | None = None
    state: EngineState = EngineState.AWAKE
    kv_epoch: int = 0
    landing: tuple[Part, ...] = ()
    kept: list[Kept] = field(default_factory=list)
    graphs: GraphMemory | None = None
    comm: CommRegion = field(default_factory=CommRegion)
    _unneeded: list[Kept] = field(default_factory=list)

    @property
    def regions(self) -> list[Region]:
        return [entry.region for entry in self.weights] + self.others

    def add_weights(self, entry: WeightRegion) -> None:
        """Raises ConfigError when there is no room for its store; then the region has no memory."""
        try:
            self._make_store(entry)
        except ConfigError:
            self._put_back([entry.region.part()])
            raise
        self.weights.append(entry)

    def map_new(self, region: Region) -> None:
        """First memory of a region, zeroed. Raises BackendError or ChunkError; then it has none."""
        part = region.part()
        try:
            map_parts([part], Timings())
            self.mover.clear([part])
            self.mover.finish(Timings())
        except (BackendError, ChunkError):
            self.mover.quiesce()
            unmap_parts([part])
            release_parts([part])
            raise

    def seal(self, entry: WeightRegion) -> None:
        """Everything is loaded: make the host store of one region hold it. Raises ChunkError, or ConfigError
        when there is no room for a store."""
        if not self.keeps_copies:
            return
        assert entry.region.mapped, f"{entry.region.name} is asleep"
        assert not entry.region.has_drops, "the bytes of dropped tensors are not there to be saved"
        self._make_store(entry)
        assert entry.store is not None, f"{entry.region.name=}"
        entry.sealed = False
        self.mover.fill(entry.region, entry.store)
        entry.sealed = True

    def discard_stores(self) -> None:
        """No host copy is of any use: make empty ones. Raises ConfigError."""
        _close_stores(self.weights)
        for entry in self.weights:
            self._make_store(entry)

    def _make_store(self, entry: WeightRegion) -> None:
        if entry.store is None and self.keeps_copies:
            entry.store = self.mover.make_store(entry.region)

    def close(self) -> None:
        """Give back every region and store; nothing works afterwards."""
        self.state = EngineState.FAILED
        self.graphs = None  # closed by its owner
        self._put_back([region.part() for region in self.regions])
        for entry in self.weights:
            if entry.store is not None:
                entry.store.leave()
            entry.store, entry.sealed = None, False
        self.forget_kept(self.regions)
        self.mover.close()

    # -- sleep

    def choose(self, nbytes: int | None) -> list[Part]:
        """What is awake; or as few chunks of it as hold ``nbytes``: KV first, then weights from the end, so
        that what wakes last is what is used last."""
        parts = [part for part in (region.awake for region in self.regions) if part.indices]
        if nbytes is None:
            return parts
        chosen: list[Part] = []
        for region in reversed(self.regions):
            missing = nbytes - sum(part.nbytes for part in chosen)
            if missing > 0 and region.tag == WEIGHTS and self._packs_while_landing:
                # Copies are dropped together, and made again from all the bytes.
                return [part for part in parts if part.region.tag == WEIGHTS] + chosen[::-1]
            if missing > 0 and (part := _at_least(region, missing)).indices:
                chosen.append(part)
        return chosen[::-1]

    @property
    def _packs_while_landing(self) -> bool:
        return self.packed is not None and not self.mover.asynchronous

    def fall_asleep(self, level: int, parts: Sequence[Part], kept: Sequence[KeptRange] = ()) -> Spent:
        """Level 1 or 2. Raises SleepError; then ``parts`` is awake, and KV was lost only if ``kv_epoch``
        has changed, except what is in ``kept``."""
        spent = Spent()
        self._check_can_sleep(level, parts)
        self.state = EngineState.FALLING_ASLEEP
        start = time.perf_counter()
        # Until something is released, making it accessible again restores every byte.
        with self._or_undo(lambda: self._undo_unmap(parts), EngineState.AWAKE, SleepError):
            self.comm.close_exports()
            self.mover.quiesce()
            waited = time.perf_counter()
            self._save_mutable(parts)
            spent.kept_bytes = self._keep(kept, parts)
            saved = time.perf_counter()
            unmap_parts(parts)
        with self._or_undo(lambda: self._undo_release(parts), EngineState.AWAKE, SleepError):
            if self.graphs is not None and not any(region.awake.indices for region in self.regions):
                spent.graph_bytes = self.graphs.sleep()
            unmapped = time.perf_counter()
            if self.packed is not None and any(part.region.tag == WEIGHTS for part in parts):
                self.packed.drop()
            trim_heap()
            dropped = time.perf_counter()
            self._release(parts)
        if level == SleepLevel.DROP_WEIGHTS:
            _close_stores(self.weights)
        self.state = EngineState.ASLEEP
        spent.quiesce_s, spent.copy_s, spent.drop_s = waited - start, saved - waited, dropped - unmapped
        spent.unmap_s = unmapped - saved + time.perf_counter() - dropped
        return spent

    def _undo_unmap(self, parts: Sequence[Part]) -> None:
        self.mover.quiesce()  # a copy of mutable weights may be on its way
        map_parts(parts, Timings())
        self._reopen_exports()
        self._forget_restored()

    def _undo_release(self, parts: Sequence[Part]) -> None:
        if self.graphs is not None:
            self.graphs.wake()
        self._bring_back(parts, Spent())
        self._reopen_exports()
        self._forget_restored()

    def _reopen_exports(self) -> None:
        if all(region.mapped for region in self.regions):
            self.comm.reopen_exports()

    def _keep(self, wanted: Sequence[KeptRange], parts: Sequence[Part]) -> int:
        found = keep(self.others, wanted, parts, self.mover)
        self.kept += found
        return sum(one.nbytes for one in found)

    def _restore_kept(self) -> None:
        """What was kept of regions that are awake now goes back where it was. The host has it until nothing
        can fail any more."""
        for one in self.kept:
            if one.region.mapped:
                one.restore(self.mover)

    def _forget_restored(self) -> None:
        self.forget_kept([region for region in self.others if region.mapped])

    def forget_kept(self, regions: Sequence[Region]) -> None:
        """Nobody needs what was kept of these regions. Host memory that the device refuses to let go is tried
        again next time: KV that is back where it was must not be lost for that."""
        self._unneeded += [one for one in self.kept if one.region in regions]
        self.kept = [one for one in self.kept if one.region not in regions]
        with suppress(BackendError):
            while self._unneeded:
                self._unneeded[-1].buffer.close()
                self._unneeded.pop()

    def _save_mutable(self, parts: Sequence[Part]) -> None:
        by_region = {part.region: part for part in parts}
        for entry in self.weights:
            if entry.mutable and entry.region in by_region and self.keeps_copies:
                if entry.sealed and entry.store is not None:
                    self.mover.save(by_region[entry.region], entry.store)
                else:
                    self.seal(entry)

    def _check_can_sleep(self, level: int, parts: Sequence[Part]) -> None:
        if level == SleepLevel.DROP_WEIGHTS:
            if self.reload is None:
                raise SleepError(
                    "sleep level 2 drops the weights, and this engine has no way to load them again"
                )
            return
        if not self.keeps_copies:
            raise SleepError(
                "sleep level 1 keeps a host copy of the weights; start the engine with --enable-sleep-mode"
            )
        regions = [part.region for part in parts]
        if any(entry.region in regions and not entry.sealed and not entry.mutable for entry in self.weights):
            raise SleepError("sleep level 1 needs the host copy of the weights, which was never sealed")

    def _release(self, parts: Sequence[Part]) -> None:
        # Weights first: if the device refuses midway they can be restored, and the KV cache is still whole.
        release_parts([part for part in parts if part.region.tag == WEIGHTS])
        others = [part for part in parts if part.region.tag != WEIGHTS]
        if others:
            self.kv_epoch += 1
            release_parts(others)

    # -- wake

    def wake_up(self, parts: Sequence[Part], *, streamed: bool = False) -> Spent:
        """Raises WakeError or ChecksumError; then ``parts`` is asleep. ``streamed``: with an asynchronous
        mover return before the bytes have landed; ``finish_wake`` is to be called."""
        spent = Spent()
        self.state = EngineState.WAKING
        asleep = [part.region for part in parts]
        lost = [entry for entry in self.weights if entry.region in asleep and not entry.sealed]
        with self._or_undo(lambda: self._put_back(parts, lost), EngineState.ASLEEP, WakeError):
            wakes_graphs = all(region.mapped or region in asleep for region in self.regions)
            self._check_room(parts, wakes_graphs)
            if self.graphs is not None and wakes_graphs:
                spent.graph_bytes = self.graphs.wake()
            if lost:
                self._load_again(lost, spent)
            self._start_bringing_back([part for part in parts if not part.region.mapped], spent)
            if streamed and self.mover.asynchronous and not self.kept:
                self.landing = tuple(parts)
                return spent
            self._finish(parts, spent)
            self._reopen_exports()
        self._awake()
        return spent

    def finish_wake(self, spent: Spent) -> None:
        """The second half of a streamed wake. Raises like ``wake_up``."""
        parts, self.landing = self.landing, ()
        with self._or_undo(lambda: self._put_back(parts), EngineState.ASLEEP, WakeError):
            self._finish(parts, spent)
            self._reopen_exports()
        self._awake()

    def _finish(self, parts: Sequence[Part], spent: Spent) -> None:
        self.mover.finish(spent)
        self._restore_kept()
        if self.mover.asynchronous:  # nothing was usable before
            for entry in self.weights:
                if any(part.region is entry.region for part in parts):
                    self._pack(entry.names, spent)

    def _awake(self) -> None:
        self._forget_restored()
        awake = all(region.mapped for region in self.regions)
        self.state = EngineState.AWAKE if awake else EngineState.ASLEEP

    def _check_room(self, parts: Sequence[Part], wakes_graphs: bool) -> None:
        filled = [part for part in parts if part.region.tag == WEIGHTS or self.fills_kv]
        needed = sum(part.nbytes for part in filled)
        if self.graphs is not None and wakes_graphs and not self.graphs.mapped:
            needed += self.graphs.nbytes
        available = self.backend.available_bytes()
        if needed > available:
            names = " and ".join(dict.fromkeys(f"'{part.region.name}'" for part in filled))
            raise WakeError(
                f"the regions {names} need {needed} bytes and the device has {available} left"
                + _after("; ", self.holders())
            )

    def _load_again(self, lost: Sequence[WeightRegion], spent: Spent) -> None:
        """After level 2. The regions do not count as awake before the loader has returned and the copy is
        sealed."""
        if self.reload is None:
            raise WakeError(
                "the weights were dropped by sleep level 2, and there is no way to load them again"
            )
        for entry in lost:  # a full disk should show before minutes of loading
            self._make_store(entry)
        map_parts([entry.region.asleep for entry in lost], spent)
        start = time.perf_counter()
        self.reload()
        spent.reload_s += time.perf_counter() - start
        for entry in lost:
            self.seal(entry)
            self._pack(entry.names, spent)

    def _bring_back(self, parts: Sequence[Part], spent: Spent) -> None:
        self._start_bringing_back(parts, spent)
        self._finish(parts, spent)

    def _start_bringing_back(self, parts: Sequence[Part], spent: Spent) -> None:
        """Map ``parts``, weights with their bytes from the store, packing them as they land."""
        by_region = {part.region: part for part in parts}
        for entry in self.weights:
            part = by_region.get(entry.region)
            if part is None:
                continue
            if entry.sealed and entry.store is not None:
                entry.region.forget_drops()
                with closing(self.mover.restore(part, entry.store, spent)) as landed:
                    for names in landed:
                        self._pack(names, spent)
            elif ChunkState.RELEASED in entry.region.state:
                raise TransitionError(f"region '{entry.region.name}' was given back and has no host copy")
            else:
                map_parts([part], spent)
                self._pack(entry.names, spent)
        others = [part for part in parts if part.region.tag != WEIGHTS]
        released = [
            Part(p.region, tuple(i for i in p.indices if p.region.state[i] is ChunkState.RELEASED))
            for p in others
        ]
        map_parts(others, spent)
        self.mover.clear([part for part in released if part.indices])

    def _pack(self, names: Sequence[str], spent: Spent) -> None:
        if self.packed is not None:
            start = time.perf_counter()
            self.packed.pack(names)
            spent.pack_s += time.perf_counter() - start

    def _put_back(self, parts: Sequence[Part], lost: Sequence[WeightRegion] = ()) -> None:
        self.mover.quiesce()
        if self.graphs is not None:
            self.graphs.sleep()
        _close_stores(lost)  # the loader fills all of them or none, so they stay lost together
        if self.packed is not None and any(part.region.tag == WEIGHTS for part in parts):
            self.packed.drop()
        unmap_parts(parts)
        release_parts(parts)

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
            corrupt = isinstance(error, StoreCorruptError) or (
                isinstance(error, ChunkError) and error.corrupt
            )
            raise (ChecksumError if corrupt else kind)(self._explain(error)) from error

    def _explain(self, error: Exception) -> str:
        if not (isinstance(error, ChunkError) and error.out_of_memory):
            return str(error)
        return f"{error}; the device has {self.backend.available_bytes()} bytes left" + _after(
            "; ", self.holders()
        )

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


def _after(separator: str, text: str) -> str:
    return separator + text if text else ""


def _at_least(region: Region, nbytes: int) -> Part:
    """The last mapped chunks that hold ``nbytes``, or all of them."""
    indices: list[int] = []
    for index in reversed(region.awake.indices):
        if nbytes <= 0:
            break
        indices.append(index)
        nbytes -= region.chunks[index][1]
    return Part(region, tuple(reversed(indices)))
