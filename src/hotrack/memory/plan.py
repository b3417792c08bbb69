"""Where each tensor of a region lives: pure arithmetic, no memory is touched."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotrack.core.tensorspec import TensorSpec

TENSOR_ALIGN = 64  # a cache line, and the widest vector
PAGE_ALIGN_FROM = 64 << 10  # tensors this big start on a page, so that dropping one frees nearly all of it


@dataclass(frozen=True, slots=True)
class Placement:
    """``spec`` at byte ``offset`` of its region."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Placements in execution order; ``nbytes`` is a whole number of pages.

    ``chunks``: (offset, nbytes) of the units that are mapped, copied and checksummed together; only the
    last is short.
    """

    placements: tuple[Placement, ...]
    nbytes: int
    chunk_bytes: int

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        starts = range(0, self.nbytes, self.chunk_bytes)
        return tuple((start, min(self.chunk_bytes, self.nbytes - start)) for start in starts)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def plan_region(specs: Sequence[TensorSpec], *, page_bytes: int, chunk_bytes: int) -> RegionPlan:
    """Place ``specs`` one after the other in the given (execution) order.

    ``page_bytes``: granule of the backend; ``chunk_bytes``: a multiple of it.
    """
    assert chunk_bytes > 0, f"{chunk_bytes=}"
    assert chunk_bytes % page_bytes == 0, f"{chunk_bytes=} {page_bytes=}"
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names), "tensor names of a region are unique"
    placements, end = [], 0
    for spec in specs:
        offset = round_up(end, page_bytes if spec.nbytes >= PAGE_ALIGN_FROM else TENSOR_ALIGN)
        placements.append(Placement(spec, offset))
        end = offset + spec.nbytes
    return RegionPlan(tuple(placements), round_up(end, page_bytes), chunk_bytes)
