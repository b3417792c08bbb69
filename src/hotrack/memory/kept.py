"""Bytes of KV regions that outlive a sleep: requests that go on after the wake."""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
from torch import Tensor

from hotrack.core.errors import ConfigError, SleepError
from hotrack.memory.region import Part, Region
from hotrack.memory.store import StoreCorruptError
from hotrack.memory.transfer import HostBuffer, Mover


@dataclass(frozen=True, slots=True, eq=False)
class KeptRange:
    """``nbytes`` bytes from byte ``offset`` of a tensor that ``allocate_bytes`` returned, or of a view."""

    tensor: Tensor
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.tensor.data_ptr() + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Ranges of one region (address, bytes), one behind the other in a host buffer, and its checksum."""

    region: Region
    ranges: tuple[tuple[int, int], ...]
    buffer: HostBuffer
    checksum: int

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)

    def restore(self, mover: Mover) -> None:
        """Raises StoreCorruptError, or BackendError when the device refuses."""
        found = _checksum(self.buffer.data)
        if found != self.checksum:
            raise StoreCorruptError(
                f"kept bytes of region '{self.region.name}': checksum is {found:016x}, "
                f"saved was {self.checksum:016x}"
            )
        mover.put(self.ranges, self.buffer)


def keep(
    regions: Sequence[Region], wanted: Sequence[KeptRange], parts: Sequence[Part], mover: Mover
) -> list[Kept]:
    """Copy what of the ranges lies in ``parts`` to the host, a copy per region.

    Raises:
        SleepError: a range is not inside one of ``regions``, or the host has no room.
        BackendError: the device refused.
    """
    going = {part.region: list(part.runs()) for part in parts}
    by_region: dict[Region, list[tuple[int, int]]] = {}
    for one in wanted:
        region = _region_of(regions, one)
        for start, nbytes in going.get(region, ()):
            low, high = max(start, one.address), min(start + nbytes, one.address + one.nbytes)
            if low < high:
                by_region.setdefault(region, []).append((low, high - low))
    kept: list[Kept] = []
    try:
        for region, ranges in by_region.items():
            buffer = mover.take(ranges)
            kept.append(Kept(region, tuple(ranges), buffer, _checksum(buffer.data)))
    except BaseException as error:
        for done in kept:
            done.buffer.close()
        if isinstance(error, ConfigError):
            nbytes = sum(size for ranges in by_region.values() for _, size in ranges)
            raise SleepError(
                f"no host memory for the {nbytes} bytes of KV of running requests, or it may not be pinned: "
                "let the requests finish (mode=wait) or end them (mode=abort)"
            ) from error
        raise
    return kept


def _region_of(regions: Sequence[Region], wanted: KeptRange) -> Region:
    for region in regions:
        start = wanted.address - region.chunk_address(0) if region.nbytes else -1
        if start >= 0 and start + wanted.nbytes <= region.nbytes:
            return region
    raise SleepError(f"{wanted.nbytes} bytes at {wanted.address:#x} are in no KV region, and cannot be kept")


def _checksum(data: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(data.numpy().data)
