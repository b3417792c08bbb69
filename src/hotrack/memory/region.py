"""A reserved virtual range with a plan and physical chunks behind it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from hotrack.core.tensorspec import TensorSpec
from hotrack.memory.backend import PhysicalBackend
from hotrack.memory.plan import Placement, RegionPlan, round_up


class ChunkState(Enum):
    RELEASED = "released"
    MAPPED = "mapped"
    UNMAPPED = "unmapped"


class Region:
    """``name`` is for people, ``tag`` is what ``wake(tags=...)`` selects. The address never changes.

    Every move states and checks the chunk's state, so nothing is released twice. A move that raises
    BackendError leaves its chunk as it was. The range stays reserved for the life of the process: a stale
    tensor faults, it never reads somebody else's bytes.
    """

    def __init__(self, name: str, tag: str, plan: RegionPlan, backend: PhysicalBackend) -> None:
        self.name = name
        self.tag = tag
        self.plan = plan
        self.chunks = plan.chunks
        self.state = [ChunkState.RELEASED] * len(self.chunks)
        self._backend = backend
        self._address = backend.reserve(plan.nbytes) if plan.nbytes else 0
        self._by_name = {p.spec.name: p for p in plan.placements}
        self._dropped: dict[str, tuple[int, int]] = {}
        self._view: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    @property
    def mapped(self) -> bool:
        """Every chunk is accessible (an empty region always is)."""
        return all(state is ChunkState.MAPPED for state in self.state)

    def chunk_address(self, index: int) -> int:
        return self._address + self.chunks[index][0]

    def map_chunk(self, index: int) -> None:
        self._move(index, ChunkState.RELEASED, ChunkState.MAPPED, self._backend.map)

    def unmap_chunk(self, index: int) -> None:
        self._move(index, ChunkState.MAPPED, ChunkState.UNMAPPED, self._backend.unmap)

    def remap_chunk(self, index: int) -> None:
        self._move(index, ChunkState.UNMAPPED, ChunkState.MAPPED, self._backend.remap)
        start, nbytes = self.chunks[index]
        for low, high in self._dropped.values():  # their pages are gone; they stay inaccessible
            low, high = max(low, start), min(high, start + nbytes)
            if low < high:
                self._backend.unmap(self._address + low, high - low)

    def release_chunk(self, index: int) -> None:
        self._move(index, ChunkState.UNMAPPED, ChunkState.RELEASED, self._backend.release)

    def _move(self, index: int, old: ChunkState, new: ChunkState, move: Callable[[int, int], None]) -> None:
        assert self.state[index] is old, f"{self.name} chunk {index}: {self.state[index]} is not {old}"
        move(self.chunk_address(index), self.chunks[index][1])
        self.state[index] = new

    def part(self, *states: ChunkState) -> "Part":
        """The chunks that are in one of ``states``; all of them without any."""
        return Part(self, tuple(i for i, state in enumerate(self.state) if not states or state in states))

    @property
    def awake(self) -> "Part":
        return self.part(ChunkState.MAPPED)

    @property
    def asleep(self) -> "Part":
        return self.part(ChunkState.RELEASED, ChunkState.UNMAPPED)

    def resident_bytes(self) -> int:
        return self._backend.resident_bytes(self._address, self.nbytes) if self.nbytes else 0

    def resident_in(self, part: "Part") -> int:
        return sum(self._backend.resident_bytes(address, nbytes) for address, nbytes in part.runs())

    def chunks_of(self, name: str) -> range:
        """Indices of the chunks that a tensor lies in."""
        placement, size = self._by_name[name], self.plan.chunk_bytes
        return range(placement.offset // size, -(-placement.end // size) if placement.spec.nbytes else 0)

    def names_in(self, index: int) -> list[str]:
        """Tensors of which some bytes are in a chunk."""
        offset, nbytes = self.chunks[index]
        return [p.spec.name for p in self.plan.placements if p.offset < offset + nbytes and p.end > offset]

    def placement(self, name: str) -> Placement:
        return self._by_name[name]

    def tensor(self, name: str) -> Tensor:
        """The view of one planned tensor."""
        return self.tensors()[name] if not self.nbytes else tensor_at(self.bytes_view, self._by_name[name])

    @property
    def bytes_view(self) -> Tensor:
        """uint8 [nbytes], the same object every time; ``nbytes`` is not 0, and the region is mapped when it
        is first asked for."""
        if self._view is None:
            self._view = self._backend.view(self._address, self.nbytes)
        return self._view

    def tensors(self) -> dict[str, Tensor]:
        """A view per planned tensor, contiguous, in plan order."""
        if not self.nbytes:
            return {
                name: torch.empty(p.spec.shape, dtype=_dtype(p.spec)) for name, p in self._by_name.items()
            }
        return {name: tensor_at(self.bytes_view, p) for name, p in self._by_name.items()}

    def drop(self, names: Iterable[str]) -> int:
        """Give back the whole pages inside the named tensors, which become inaccessible. Returns bytes
        given back."""
        page, total = self._backend.page_bytes, 0
        for name in names:
            placement = self._by_name[name]
            low, high = round_up(placement.offset, page), placement.end // page * page
            if name in self._dropped or low >= high:
                continue
            inside = self.state[low // self.plan.chunk_bytes : -(-high // self.plan.chunk_bytes)]
            assert all(state is ChunkState.MAPPED for state in inside), f"{name} of {self.name} is asleep"
            self._backend.unmap(self._address + low, high - low)
            self._dropped[name] = low, high
            self._backend.release(self._address + low, high - low)
            total += high - low
        return total

    @property
    def has_drops(self) -> bool:
        return bool(self._dropped)

    def forget_drops(self) -> None:
        """The whole region is about to be filled again: nothing counts as dropped any more."""
        self._dropped.clear()


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype), f"{spec.name}: {spec.dtype=}"
    return dtype


def tensor_at(whole: Tensor, placement: Placement) -> Tensor:
    """The planned tensor inside the bytes of a region, or of a copy of it."""
    raw = whole[placement.offset : placement.end]
    return raw.view(_dtype(placement.spec)).view(placement.spec.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """Some chunks of a region, in ascending order."""

    region: Region
    indices: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.region.chunks[index][1] for index in self.indices)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each run of neighbours."""
        start = end = 0
        for index in self.indices:
            address = self.region.chunk_address(index)
            if address != end:
                if end:
                    yield start, end - start
                start = address
            end = address + self.region.chunks[index][1]
        if end:
            yield start, end - start
