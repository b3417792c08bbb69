"""What sequences hold of one cache group, by the group's kind: blocks of all tokens, blocks of the last ones,
or a state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotrack.kvcache.block_pool import NULL_BLOCK, BlockPool
from hotrack.kvcache.prefix_cache import PrefixCache
from hotrack.kvcache.spec import CacheGroup, OpenGroup, Paged, State, Window

Int64Array = NDArray[np.int64]
# Per step: int32 [S, n] tables and int64 [T or S] places, see layers.batch.GroupTables.
StepTables = tuple[NDArray[np.int32], Int64Array]


class Holdings(ABC):
    """One group's pool, prefix cache, and what each slot holds. A *slot* is a running sequence's row.

    ``table``  int32 [num_slots, n], what the next step of each slot addresses.
    """

    def __init__(self, group: CacheGroup, num_blocks: int, num_slots: int, width: int) -> None:
        self.block_tokens = group.tokens_per_block
        self.prefix = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.prefix.forget)
        self.table: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)

    @abstractmethod
    def longest_hit(self, hashes: Sequence[bytes], count: int) -> int:
        """The largest n <= ``count`` so that a sequence may start behind the n blocks of ``hashes[:n]``."""

    @abstractmethod
    def hit_blocks(self, hashes: Sequence[bytes], count: int) -> tuple[int, ...]:
        """What such a start takes from the prefix cache."""

    @abstractmethod
    def new_blocks(self, num_tokens: int, num_cached: int) -> int:
        """Most blocks to allocate for a sequence of ``num_tokens`` of which a hit covers ``num_cached``."""

    @abstractmethod
    def admit(self, slot: int, blocks: Sequence[int], num_tokens: int) -> None:
        """Give ``slot`` the blocks of its hit, which covers ``num_tokens``."""

    @abstractmethod
    def short(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> int:
        """Blocks that :meth:`grow` would allocate beyond those it frees."""

    @abstractmethod
    def grow(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> None:
        """The next step computes tokens ``computed`` to ``num_tokens`` of ``slot``."""

    @abstractmethod
    def name(self, slot: int, first: int, full: int, hashes: Sequence[bytes]) -> None:
        """Blocks ``first`` to ``full`` are known: enter them, or states up to there, into the cache."""

    @abstractmethod
    def exclusive(self, slot: int) -> int:
        """Blocks that releasing ``slot`` would make available (those no other slot shares)."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Give back everything ``slot`` holds."""

    @abstractmethod
    def step_tables(
        self, slots: Int64Array, token_slots: Int64Array, positions: Int64Array, longest: int
    ) -> StepTables:
        """``slots`` [S] of a step's sequences, ``token_slots`` and ``positions`` [T] of its tokens."""

    def rewind(self, slot: int, num_tokens: int) -> int:  # noqa: ARG002
        """The position that the next step must start from when only ``num_tokens`` count."""
        return num_tokens

    def has_unnamed(self, slot: int, num_tokens: int) -> bool:  # noqa: ARG002
        """Whether something beside blocks waits to be named, at ``num_tokens`` or before."""
        return False

    def revived(self, blocks: Sequence[int]) -> int:
        """How many free blocks a hit on ``blocks`` uses up."""
        return sum(block != NULL_BLOCK and self.pool.ref_count(block) == 0 for block in blocks)


class PagedHoldings(Holdings):
    """Blocks of all tokens of a sequence."""

    def __init__(self, group: CacheGroup, num_blocks: int, num_slots: int, width: int) -> None:
        super().__init__(group, num_blocks, num_slots, width)
        self.ratio = group.spec.ratio if isinstance(group.spec, Paged) else 1
        self.held = [0] * num_slots  # entries of each slot's table row

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def longest_hit(self, hashes: Sequence[bytes], count: int) -> int:
        return len(self.prefix.match(hashes[:count]))

    def hit_blocks(self, hashes: Sequence[bytes], count: int) -> tuple[int, ...]:
        return tuple(self.prefix.match(hashes[:count]))

    def new_blocks(self, num_tokens: int, num_cached: int) -> int:
        return self.blocks_for(num_tokens) - num_cached // self.block_tokens

    def admit(self, slot: int, blocks: Sequence[int], num_tokens: int) -> None:  # noqa: ARG002
        assert self.held[slot] == 0, f"{slot=} still holds blocks"
        for block in blocks:
            if block != NULL_BLOCK:
                self.pool.acquire(block)
        self.table[slot, : len(blocks)] = blocks
        self.held[slot] = len(blocks)

    def short(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> int:  # noqa: ARG002
        return max(0, self.blocks_for(num_tokens) - self.held[slot])

    def grow(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> None:  # noqa: ARG002
        needed, held = self.blocks_for(num_tokens), self.held[slot]
        if needed > held:
            self.table[slot, held:needed] = self.pool.allocate(needed - held)
            self.held[slot] = needed

    def name(self, slot: int, first: int, full: int, hashes: Sequence[bytes]) -> None:
        for index, block in enumerate(self.table[slot, first:full].tolist(), first):
            if block != NULL_BLOCK and self.prefix.insert(hashes[index], block):
                self.pool.mark_cached(block)

    def exclusive(self, slot: int) -> int:
        return sum(self.pool.ref_count(b) == 1 for b in self._blocks(slot))

    def release(self, slot: int) -> None:
        self.pool.release(reversed(self._blocks(slot)))
        self.table[slot, : self.held[slot]] = NULL_BLOCK
        self.held[slot] = 0

    def step_tables(
        self, slots: Int64Array, token_slots: Int64Array, positions: Int64Array, longest: int
    ) -> StepTables:
        block, offset = np.divmod(positions, self.block_tokens)
        places = self.table[token_slots, block].astype(np.int64) * self.block_tokens + offset
        if self.ratio > 1:  # a block has block_tokens / ratio entries, each made by the last of its tokens
            places = np.where((positions + 1) % self.ratio == 0, places // self.ratio, -1)
        return self.table[slots, : self.blocks_for(longest)], places

    def _blocks(self, slot: int) -> list[int]:
        blocks: list[int] = self.table[slot, : self.held[slot]].tolist()
        return blocks


class WindowHoldings(PagedHoldings):
    """Blocks of a sequence's last tokens; earlier entries of its table row are the null block.

    ``max_step_tokens``: most new tokens of a sequence in one step.
    """

    def __init__(
        self,
        group: CacheGroup,
        spec: Window,
        num_blocks: int,
        num_slots: int,
        width: int,
        max_step_tokens: int,
    ) -> None:
        super().__init__(group, num_blocks, num_slots, width)
        self.past, self.slack = spec.window - 1, spec.slack  # tokens that a token sees beside itself
        self.most = window_blocks(spec, self.block_tokens, max_step_tokens)
        self.first = [0] * num_slots  # entries of each table row before this one are freed

    def longest_hit(self, hashes: Sequence[bytes], count: int) -> int:
        while count:
            seen = range(count - 1, self._first_seen(count * self.block_tokens) - 1, -1)
            absent = next((i for i in seen if self.prefix.get(hashes[i]) is None), None)
            if absent is None:
                return count
            count = absent  # every hit after it would need it, too
        return 0

    def hit_blocks(self, hashes: Sequence[bytes], count: int) -> tuple[int, ...]:
        first = self._first_seen(count * self.block_tokens)
        found = [self.prefix.get(key) or NULL_BLOCK for key in hashes[first:count]]
        return (*[NULL_BLOCK] * first, *found)

    def new_blocks(self, num_tokens: int, num_cached: int) -> int:
        return min(super().new_blocks(num_tokens, num_cached), self.most)

    def admit(self, slot: int, blocks: Sequence[int], num_tokens: int) -> None:
        super().admit(slot, blocks, num_tokens)
        self.first[slot] = self._first_seen(num_tokens)

    def short(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> int:
        freed = self.table[slot, self.first[slot] : self._first_kept(computed)].tolist()
        freeable = sum(self.pool.ref_count(block) == 1 for block in freed)
        return super().short(slot, num_tokens, computed, num_drafts) - freeable

    def grow(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> None:
        assert num_drafts <= self.slack, f"{num_drafts=} {self.slack=}"
        first, kept = self.first[slot], self._first_kept(computed)
        if kept > first:
            # A step in flight may still read them, but whoever gets them writes in a later step.
            self.pool.release(self.table[slot, first:kept].tolist(), evict_first=True)
            self.table[slot, first:kept] = NULL_BLOCK
            self.first[slot] = kept
        super().grow(slot, num_tokens, computed, num_drafts)

    def release(self, slot: int) -> None:
        super().release(slot)
        self.first[slot] = 0

    def _blocks(self, slot: int) -> list[int]:
        blocks: list[int] = self.table[slot, self.first[slot] : self.held[slot]].tolist()
        return blocks

    def _first_seen(self, computed: int) -> int:
        """The first block that the token at position ``computed`` sees."""
        return max(0, computed - self.past) // self.block_tokens

    def _first_kept(self, computed: int) -> int:
        return self._first_seen(computed - self.slack)


def window_blocks(spec: Window, block_tokens: int, step_tokens: int) -> int:
    """Most blocks that a sequence holds while a step computes ``step_tokens`` of it."""
    return -(-(spec.window - 1 + spec.slack + step_tokens) // block_tokens) + 1


def hold(
    group: CacheGroup, num_blocks: int, num_slots: int, width: int, max_step_tokens: int, snapshots: bool
) -> Holdings:
    """The holdings of the group's kind. ``snapshots``: of states, for the prefix cache."""
    spec = group.spec
    if isinstance(spec, OpenGroup):
        return OpenGroupHoldings(group, spec, num_blocks, num_slots, snapshots)
    if isinstance(spec, State):
        return StateHoldings(group, num_blocks, num_slots, snapshots)
    if isinstance(spec, Window):
        return WindowHoldings(group, spec, num_blocks, num_slots, width, max_step_tokens)
    return PagedHoldings(group, num_blocks, num_slots, width)


class StateHoldings(Holdings):
    """One row per sequence that each step rewrites, and rows that stay as they are: snapshots.

    ``table`` [num_slots, 2]: the row that the next step reads (the null row: start from zeros), and the row
    that it writes. ``hashes[n - 1]`` names the state after n blocks.
    """

    def __init__(self, group: CacheGroup, num_blocks: int, num_slots: int, snapshots: bool) -> None:
        super().__init__(group, num_blocks, num_slots, 2)
        self.snapshots = snapshots
        self._slots: dict[int, _State] = {}

    def longest_hit(self, hashes: Sequence[bytes], count: int) -> int:
        return next((n for n in range(count, 0, -1) if self.prefix.get(hashes[n - 1]) is not None), 0)

    def hit_blocks(self, hashes: Sequence[bytes], count: int) -> tuple[int, ...]:
        return tuple(self.prefix.match(hashes[count - 1 : count]))

    def new_blocks(self, num_tokens: int, num_cached: int) -> int:  # noqa: ARG002
        return 1

    def admit(self, slot: int, blocks: Sequence[int], num_tokens: int) -> None:
        assert slot not in self._slots, f"{slot=} still holds a state"
        state = self._slots[slot] = _State(position=num_tokens)
        for row in blocks:
            self.pool.acquire(row)
            state.row, state.shared = row, True

    def short(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> int:  # noqa: ARG002
        state = self._slots[slot]
        new = state.row == NULL_BLOCK or state.shared or num_drafts > 0
        return int(new) - sum(self.pool.ref_count(row) == 1 for row in state.read)

    def grow(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> None:
        """Snapshots that nobody depends on are made while there are free rows."""
        state = self._slots[slot]
        assert state.position == computed, f"{slot=}: the state is at {state.position}, not {computed}"
        self.pool.release(state.read)
        state.read = []
        read = write = state.row
        snapshot = self.snapshots and self._at_end(computed) and self.pool.num_free > 0
        if read == NULL_BLOCK or state.shared or num_drafts or snapshot:
            (write,) = self.pool.allocate(1)
            if read != NULL_BLOCK:
                self._set_aside(state, read)
        state.before = (computed, read) if num_drafts else None
        state.chunk = num_tokens - computed > 1
        state.row, state.position, state.shared = write, num_tokens, False
        self.table[slot] = read, write

    def _at_end(self, position: int) -> bool:
        """Whether a block ends there."""
        return position > 0 and position % self.block_tokens == 0

    def _set_aside(self, state: "_State", row: int) -> None:
        """``row`` is read once more, and if it is at a block's end, kept until it can be named."""
        if not self.snapshots or state.shared or not self._at_end(state.position):
            state.read.append(row)
        else:
            state.unnamed.append((state.position, row, state.chunk))

    def name(self, slot: int, first: int, full: int, hashes: Sequence[bytes]) -> None:  # noqa: ARG002
        state = self._slots[slot]
        known = [entry for entry in state.unnamed if entry[0] <= full * self.block_tokens]
        state.unnamed = state.unnamed[len(known) :]
        for position, row, chunk in known:
            key = hashes[position // self.block_tokens - 1]
            if self.prefix.insert(key, row):
                self.pool.mark_cached(row)
                if not chunk:
                    self._supersede(state, key, row)
            # The step that is being planned reads it, so it cannot be anybody's to write before the next.
            state.read.append(row)

    def _supersede(self, state: "_State", key: bytes, row: int) -> None:
        """Of the states along a generated text only the last one is likely to be wanted again."""
        if state.trail is not None and self.prefix.get(state.trail[0]) == state.trail[1]:
            self.pool.demote(state.trail[1])
        state.trail = key, row

    def rewind(self, slot: int, num_tokens: int) -> int:
        state = self._slots[slot]
        if num_tokens == state.position:
            return num_tokens
        assert state.before is not None, f"{slot=}: the step had no drafts"
        position, row = state.before
        assert position <= num_tokens < state.position, f"{position=} {num_tokens=} {state.position=}"
        state.read = [kept for kept in state.read if kept != row] + [state.row]
        state.unnamed = [entry for entry in state.unnamed if entry[1] != row]
        state.row, state.position, state.before = row, position, None
        state.shared = row != NULL_BLOCK and position % self.block_tokens == 0  # it may have a name
        return position

    def has_unnamed(self, slot: int, num_tokens: int) -> bool:
        return any(position <= num_tokens for position, _, _ in self._slots[slot].unnamed)

    def exclusive(self, slot: int) -> int:
        return sum(self.pool.ref_count(row) == 1 for row in self._rows(slot))

    def release(self, slot: int) -> None:
        self.pool.release(self._rows(slot))
        self._slots.pop(slot, None)
        self.table[slot] = NULL_BLOCK

    def step_tables(
        self,
        slots: Int64Array,
        token_slots: Int64Array,  # noqa: ARG002
        positions: Int64Array,  # noqa: ARG002
        longest: int,  # noqa: ARG002
    ) -> StepTables:
        return self.table[slots, :1], self.table[slots, 1].astype(np.int64)

    def _rows(self, slot: int) -> list[int]:
        state = self._slots.get(slot)
        if state is None:
            return []
        rows = [*state.read, *(row for _, row, _ in state.unnamed)]
        return rows if state.row == NULL_BLOCK else [*rows, state.row]


class OpenGroupHoldings(StateHoldings):
    """Rings of rows, written in place. Where groups do not overlap, a sequence that starts at a block's end
    starts with an empty one, and there are no snapshots."""

    def __init__(
        self, group: CacheGroup, spec: OpenGroup, num_blocks: int, num_slots: int, snapshots: bool
    ) -> None:
        super().__init__(group, num_blocks, num_slots, snapshots and spec.overlap)
        self.overlap, self.slack = spec.overlap, spec.slack

    def longest_hit(self, hashes: Sequence[bytes], count: int) -> int:
        return super().longest_hit(hashes, count) if self.overlap else count

    def hit_blocks(self, hashes: Sequence[bytes], count: int) -> tuple[int, ...]:
        return super().hit_blocks(hashes, count) if self.overlap else ()

    def short(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> int:  # noqa: ARG002
        return super().short(slot, num_tokens, computed, 0)

    def grow(self, slot: int, num_tokens: int, computed: int, num_drafts: int) -> None:
        assert num_drafts <= self.slack, f"{num_drafts=} {self.slack=}"
        super().grow(slot, num_tokens, computed, 0)

    def rewind(self, slot: int, num_tokens: int) -> int:
        state = self._slots[slot]
        assert 0 <= state.position - num_tokens <= self.slack + 1, f"{state.position=} {num_tokens=}"
        state.position = num_tokens
        return num_tokens


class _State:
    """``row``: where the state at ``position`` is once every planned step is done.

    shared    ``row`` is a snapshot that others may read: it must not be written
    read      rows that only the last planned step still reads
    unnamed   (position, row, whether a chunk ended there) of snapshots whose tokens are not all known yet
    chunk     the last planned step computed more than one token
    before    position and row before a step with drafts
    trail     name and row of the last snapshot along the generated text
    """

    __slots__ = ("before", "chunk", "position", "read", "row", "shared", "trail", "unnamed")

    def __init__(self, position: int) -> None:
        self.row = NULL_BLOCK
        self.position = position
        self.shared = False
        self.chunk = False
        self.read: list[int] = []
        self.unnamed: list[tuple[int, int, bool]] = []
        self.before: tuple[int, int] | None = None
        self.trail: tuple[bytes, int] | None = None
