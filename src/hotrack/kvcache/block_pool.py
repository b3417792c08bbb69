"""Physical blocks of one cache group: reference counts and an LRU of free blocks whose content is still
useful.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks, of which block 0 is the null block: never handed out, so that padded table
    entries and
    padded rows have somewhere harmless to point.

    A block is *used* (reference count > 0), *cached-free* (count 0, content still named by the prefix
    cache) or *free*. Plain free blocks are handed out first; then the least recently released cached one
    is, after ``on_evict`` was told. Nothing here locks: the scheduler is the one owner.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks=}"
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._refs[NULL_BLOCK] = 1
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: set[int] = set()
        self._lru: OrderedDict[int, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could hand out now, cached-free ones included."""
        return len(self._free) + len(self._lru)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def used(self) -> NDArray[np.int64]:
        """int64 [n], ascending: blocks with references, without the null block."""
        return np.flatnonzero(np.asarray(self._refs)[NULL_BLOCK + 1 :]) + NULL_BLOCK + 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with reference count 1. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count=} {self.num_free=}"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a used or cached-free block (a prefix hit)."""
        assert self._refs[block] > 0 or block in self._lru, f"{block=} is free and holds nothing"
        self._lru.pop(block, None)
        self._refs[block] += 1

    def release(self, blocks: Iterable[int], *, evict_first: bool = False) -> None:
        """One reference less each. Pass a sequence's blocks last first, so that its beginning is evicted
        last. ``evict_first``: their content is less likely to be wanted than any other.
        """
        for block in blocks:
            assert block != NULL_BLOCK, f"{block=} is the null block"
            assert self._refs[block] > 0, f"{block=} is released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._cached:
                    self._lru[block] = None
                    self._lru.move_to_end(block, last=not evict_first)
                else:
                    self._free.append(block)

    def demote(self, block: int) -> None:
        """If it is cached-free, evict this block before any other."""
        if block in self._lru:
            self._lru.move_to_end(block, last=False)

    def mark_cached(self, block: int) -> None:
        """The prefix cache names this used block; once released it becomes cached-free."""
        assert self._refs[block] > 0, f"{block=} is not in use"
        self._cached.add(block)

    def forget_cached(self) -> None:
        """The prefix cache was emptied: every cached-free block is plainly free."""
        self._free.extend(self._lru)
        self._lru.clear()
        self._cached.clear()

    def _evict(self) -> int:
        block, _ = self._lru.popitem(last=False)
        self._cached.discard(block)
        if self._on_evict is not None:
            self._on_evict(block)
        return block
